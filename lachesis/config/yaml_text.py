"""Write YAML that every reader understands the same way, and read it fast."""

import re

import yaml

# The monitor reads the configurations of a hundred runs per tick; the one in C takes a tenth of the
# time.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LINE_ENDS = re.compile(r"[\r\x85\u2028\u2029\ufeff]")


class _Dumper(yaml.SafeDumper):
    """Writes texts so that they are read again as they were."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Without double quotes YAML reads these characters as the end of a line, and folds them.
    style = '"' if _LINE_ENDS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(content: object) -> str:
    """Write plain data as YAML, in the order it has, from which every reader gets the same data."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
