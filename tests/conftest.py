"""Before any test module is imported: the project's files are found, and nothing ever asks the network."""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"       # transformers reads it once, at its first import
sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
