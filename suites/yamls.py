"""YAML files in a fixed form, read through pydantic; a damaged one is told in one line."""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from sdbench.errors import SdbenchError, cannot_read
from sdbench.results import first_fault


class Strict(BaseModel):
    """A form that takes no field that it doesn't know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Form = TypeVar("Form", bound=BaseModel)


def read_yaml(path: Path, form: type[Form]) -> Form:
    """Reads one file.

    Args:
        path: The file.
        form: What it must hold.

    Raises:
        SdbenchError: It cannot be read, is no YAML, or is not of the form (file and first fault named).
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return form.model_validate(content)
    except OSError as error:
        raise cannot_read(path, error) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SdbenchError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise SdbenchError(f"{path}: {first_fault(error)}") from error
