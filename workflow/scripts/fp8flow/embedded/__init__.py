"""The embedded engine: ModelOpt FP8 checkpoints served by transformers on the CPU.

``protocol`` is plain Python. Every other module here needs torch and is imported in the server
process only, never by the workflow itself.
"""
