"""Parsers of command lines."""

import argparse
from typing import Any, NoReturn

from hp_train.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line in one line.

    Args:
        see: Command that shows its help; empty: the program with ``--help``.
        **options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, see: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._see = see or f"{self.prog} --help"

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} (see {self._see})")
