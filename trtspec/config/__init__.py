"""The YAML edge: one file in, one frozen `Config` out, or every problem at its line and column."""

from trtspec.config.export import config_schema, dump_config, starter_config
from trtspec.config.load import load_config, load_file
from trtspec.config.schema import Config

__all__ = ["Config", "config_schema", "dump_config", "load_config", "load_file", "starter_config"]
