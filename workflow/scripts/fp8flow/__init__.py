"""fp8flow: from a model and two data sets to a checked MLPerf Inference submission."""

__version__ = "0.1.0"
