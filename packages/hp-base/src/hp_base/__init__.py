"""What every package stands on, without torch: whole files, strangers' folders, one-line errors."""

from hp_base.atomic_write import replace_file
from hp_base.errors import HpError
from hp_base.folder import DamageError, Folder

__all__ = ["DamageError", "Folder", "HpError", "__version__", "replace_file"]
__version__ = "0.1.0"
