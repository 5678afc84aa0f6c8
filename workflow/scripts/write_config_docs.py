"""Write config/config.yaml, config/schema.json and config/README.md from the models."""

from pathlib import Path

from fp8flow.config_docs import write_all

if __name__ == "__main__":
    write_all(Path(__file__).resolve().parents[2])
