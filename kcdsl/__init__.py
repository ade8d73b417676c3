from kcdsl.declare import metric

__version__ = "0.1.0"
__all__ = ["__version__", "metric"]
