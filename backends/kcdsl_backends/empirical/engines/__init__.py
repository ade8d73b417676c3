"""What runs the parts of a model, besides PyTorch itself: compilers, quantisers, other runtimes."""
