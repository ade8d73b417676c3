"""ONNX files as models: their graph is the program, and their initializers are the checkpoint."""
