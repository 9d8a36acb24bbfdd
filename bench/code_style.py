"""Measure how readable the code is, and fail when a number falls below its floor.

Run it as `make house`. It reads the packages that users install (`lachesis`, `flows`, `tasks`,
`deployments`) with Python's own parser and prints one line per number: what was measured, the
value, and what is allowed. Names and sentences are judged by word lists, which only catch what is
plainly wrong; a person still has to read the code.
"""

import ast
import graphlib
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("lachesis", "flows", "tasks", "deployments")
BUDGETS = "bench/package_budgets.tsv"
MAX_COLUMNS = 100
VAGUE_NAMES = {"one", "found", "told", "known", "said", "made", "wanted", "asked", "given"}
# Comments for tools say nothing to a reader, so they do not count as comments.
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|mypy:|!)")
# A sentence that does not begin with a verb must hold one of these, or a word that ends like a
# verb.
FINITE_VERB = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|does|do|can|may|must|will|would|should|[a-z]{2,}(?:s|ed))\b"
)
# Phrases that make a reader look elsewhere for the noun, or that give a process a mind.
VAGUE_PHRASE = re.compile(
    r"\b(what (is|was|were|it|they|has|have|can|will)|of it|that it has|(that|this|the) one|hears?"
    r"|(is|are|was|were|be) (asked|told)|lies|one(?=[.,;:)]))\b(?!\w)"
)
NOT_VERBS = set(
    re.findall(
        r"\w+",
        """a an the this that these those what whether how why where who whose which all any both
        each every some no none not of in on at by to for from with without as if when while until
        after before only one two three its it and or""",
    )
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@dataclass
class Source:
    """One parsed module."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@dataclass
class Measure:
    """One number of the house, what is allowed, and examples of what spoils it."""

    title: str
    value: float
    allowed: str
    holds: bool
    unit: str = ""
    examples: list[str] = field(default_factory=list)


def forbid(title: str, places: list[str]) -> Measure:
    """Return the number of places, of which none is allowed."""
    return Measure(title, len(places), "0", not places, examples=places)


def read_sources(root: Path) -> list[Source]:
    """Return the parsed modules of every package, sorted by path."""
    sources = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        relative = path.relative_to(root)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        sources.append(Source(relative, name, text, ast.parse(text)))
    return sources


def iterate_functions(source: Source) -> Iterator[Function]:
    """Yield every function of a module, nested ones too."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node


def count_lines(function: Function) -> int:
    """Return how many lines a function has from `def` to its end, without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    skipped = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - skipped


def iterate_variables(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the name and line of every variable and parameter where it gets its value."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def is_any(annotation: ast.expr | None) -> bool:
    """Return whether an annotation is `Any`, which allows every mistake."""
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def iterate_public(source: Source) -> Iterator[Documented]:
    """Yield the module and what others may use of it: functions and classes, and methods of public
    classes.
    """
    yield source.tree
    pending: list[ast.Module | ast.ClassDef] = [source.tree]
    while pending:
        for node in pending.pop().body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    pending.append(node)


def is_sentence(docstring: str, node: Documented) -> bool:
    """Return whether a docstring's first paragraph is a whole sentence with a verb.

    That of a function must begin with the verb; that of a class or module may begin with what it is
    about.
    """
    first = re.split(r"\n\s*\n", docstring.strip())[0]
    words = re.findall(r"[\w'`-]+", first)
    if len(words) < 3 or not re.search(r"[.:!?]`*\"?\s*$|[.:] ", first):
        return False
    if isinstance(node, Function):
        return words[0].lower() not in NOT_VERBS and words[0][0].isupper()
    return bool(FINITE_VERB.search(first)) or words[0].lower() not in NOT_VERBS


def find_vague_sentences(source: Source) -> Iterator[str]:
    """Yield the first sentences of docstrings that have a vague phrase, with their places."""
    for node in ast.walk(source.tree):
        docstring = ast.get_docstring(node) if isinstance(node, Documented) else None
        first = " ".join((docstring or "").split("\n\n")[0].split())
        if phrase := VAGUE_PHRASE.search(first):
            place = f"{source.path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"
            yield f"{place} “{phrase.group()}”: {first}"


def count_comment_lines(source: Source) -> int:
    """Return how many lines hold a comment for readers."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(
        token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string) for token in tokens
    )


def find_circle(sources: list[Source]) -> list[str]:
    """Return the modules of one import circle, or an empty list."""
    names = {source.name for source in sources}
    graph: dict[str, set[str]] = {source.name: set() for source in sources}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            modules = [target for target in targets if target in names and target != source.name]
            # A package is not imported for itself when one of its modules is named.
            graph[source.name].update(
                m for m in modules if not any(o.startswith(f"{m}.") for o in modules)
            )
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def measure_sizes(sources: list[Source]) -> list[Measure]:
    """Measure the lengths of lines, functions and modules."""
    modules = {str(source.path): len(source.lines) for source in sources}
    functions = {
        f"{source.path}:{function.lineno} {function.name}": count_lines(function)
        for source in sources
        for function in iterate_functions(source)
    }
    sizes = sorted(functions.values())
    p95 = statistics.quantiles(sizes, n=20)[-1]
    code = [
        (source, number, line)
        for source in sources
        for number, line in enumerate(source.lines, 1)
        if line.strip()
    ]
    long = [f"{source.path}:{number}" for source, number, line in code if len(line) > MAX_COLUMNS]
    share = 100 * len(long) / len(code)
    large_modules = [f"{path} {size}" for path, size in modules.items() if size > 400]
    large_functions = [f"{name} {size}" for name, size in functions.items() if size > 60]
    return [
        Measure("modules", len(modules), "", True),
        Measure("lines of a module, median", statistics.median(modules.values()), "", True),
        Measure(
            "lines of a module, most",
            max(modules.values()),
            "≤ 400",
            not large_modules,
            "",
            large_modules,
        ),
        Measure("lines of a function, median", statistics.median(sizes), "", True),
        Measure("lines of a function, 95 of 100 at most", p95, "≤ 30", p95 <= 30),
        Measure(
            "lines of a function, most", sizes[-1], "≤ 60", not large_functions, "", large_functions
        ),
        Measure(f"lines over {MAX_COLUMNS} columns", share, "< 1 %", share < 1, " %", long),
    ]


def measure_names(sources: list[Source]) -> list[Measure]:
    """Measure how many variables have a name that says nothing, and how long names of functions
    are.
    """
    variables = [
        (source, *variable) for source in sources for variable in iterate_variables(source)
    ]
    vague = [
        f"{source.path}:{line} {name}" for source, name, line in variables if name in VAGUE_NAMES
    ]
    names = [
        f.name.strip("_")
        for source in sources
        for f in iterate_functions(source)
        if not f.name.startswith("__")
    ]
    classes = Counter(
        node.name
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    )
    twice = sorted(name for name, count in classes.items() if count > 1)
    share = 100 * len(vague) / len(variables)
    return [
        Measure("variables with a vague name", share, "< 0.3 %", share < 0.3, " %", vague),
        Measure("letters of a function's name, mean", statistics.mean(map(len, names)), "", True),
        forbid("class names that stand for two things", twice),
    ]


def measure_style(sources: list[Source]) -> list[Measure]:
    """Measure conditional expressions, comments, parameters of type `Any`, return types, and import
    circles.
    """
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    conditional = 100 * sum(isinstance(node, ast.IfExp) for node in nodes) / statements
    lines = sum(len(source.lines) for source in sources)
    comments = 100 * sum(count_comment_lines(source) for source in sources) / lines
    loose = sum(isinstance(node, ast.arg) and is_any(node.annotation) for node in nodes)
    functions = [node for node in nodes if isinstance(node, Function)]
    typed = 100 * sum(function.returns is not None for function in functions) / len(functions)
    circle = find_circle(sources)
    return [
        Measure("conditional expressions per 100 statements", conditional, "≤ 2", conditional <= 2),
        Measure("lines with a comment", comments, "≥ 2 %", comments >= 2, " %"),
        Measure("parameters of type Any", loose, "≤ 106", loose <= 106),
        Measure("functions with a return type", typed, "100 %", typed == 100, " %"),
        Measure(
            "modules in an import circle",
            len(set(circle)),
            "0",
            not circle,
            "",
            [" > ".join(circle)],
        ),
    ]


def measure_docstrings(sources: list[Source]) -> list[Measure]:
    """Measure how many public names have a docstring and how many docstrings are sentences."""
    documented, missing, fragments = 0, [], []
    vague = [place for source in sources for place in find_vague_sentences(source)]
    for source in sources:
        for node in iterate_public(source):
            place = f"{source.path}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"
            docstring = ast.get_docstring(node)
            if docstring is None:
                missing.append(place)
                continue
            documented += 1
            if not is_sentence(docstring, node):
                fragments.append(f"{place} {docstring.splitlines()[0]}")
    share = 100 * documented / (documented + len(missing))
    return [
        Measure("public names with a docstring", share, "≥ 90 %", share >= 90, " %", missing),
        forbid("docstrings that are no sentence with a verb", fragments),
        forbid("first sentences with a vague phrase", vague),
    ]


def get_package(path: Path) -> str:
    """Return the package whose budget a module belongs to: a folder of the library, or a folder
    beside it.
    """
    if path.parts[0] == "lachesis" and len(path.parts) > 2:
        return "/".join(path.parts[:2])
    return path.parts[0]


def measure_packages(sources: list[Source], root: Path) -> tuple[list[str], Measure]:
    """Return a table of lines and statements per package, and whether one has outgrown its budget.

    `package_budgets.tsv` has for each package its lines and statements at eb4fcaa, where the rooms
    were designed, and its budget: a package may have a tenth more statements. Whoever needs more
    raises the budget in the same commit, and says why.
    """
    lines: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    for source in sources:
        package = get_package(source.path)
        lines[package] += len(source.lines)
        statements[package] += sum(isinstance(node, ast.stmt) for node in ast.walk(source.tree))
    total_lines, total_statements = lines.total(), statements.total()
    rows, outgrown = [], []
    old_lines, old_statements = 0, 0
    for row in (root / BUDGETS).read_text(encoding="utf-8").splitlines()[1:]:
        package, *numbers = row.split("\t")
        then_lines, then_statements, budget = map(int, numbers)
        old_lines, old_statements = old_lines + then_lines, old_statements + then_statements
        now_lines, now_statements = lines.pop(package, 0), statements.pop(package, 0)
        rows.append(
            f"  {package:<32}{then_lines:>7}{now_lines:>7}{then_statements:>9}{now_statements:>7}"
            f"{budget:>8}"
        )
        if now_statements > 1.1 * budget:
            outgrown.append(f"{package}: {now_statements} statements, budget {budget}")
    outgrown += [f"{package} has no line in {BUDGETS}" for package in statements]
    rows.append(
        f"  {'all':<32}{old_lines:>7}{total_lines:>7}{old_statements:>9}{total_statements:>7}"
    )
    return rows, forbid("packages above their budget by more than a tenth", outgrown)


def count_assets(root: Path) -> list[str]:
    """Return the lines of templates, style sheets and scripts of the pages."""
    rows = []
    for folder in ("templates", "static"):
        files = [file for file in (root / "lachesis/web" / folder).glob("*.*") if file.is_file()]
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        rows.append(f"  lachesis/web/{folder:<19}{lines:>13}")
    return rows


def measure_house(root: Path) -> list[Measure]:
    """Return all numbers of the packages under `root`."""
    sources = read_sources(root)
    measurements: list[Callable[[list[Source]], list[Measure]]] = [
        measure_sizes,
        measure_names,
        measure_style,
        measure_docstrings,
    ]
    return [measure for measurement in measurements for measure in measurement(sources)]


def main() -> int:
    """Print the numbers; with `--all`, everything that spoils one. Return 1 when a number is not
    allowed.
    """
    shown = None if "--all" in sys.argv else 3
    root = Path(__file__).resolve().parents[1]
    rows, budget = measure_packages(read_sources(root), root)
    print(f"  {'Python at eb4fcaa and now':<32}{'lines':>14}{'statements':>16}  budget")
    print("\n".join([*rows, *count_assets(root)]))
    measures = [*measure_house(root), budget]
    for measure in measures:
        mark = "  " if measure.holds else "! "
        value = f"{measure.value:.1f}".removesuffix(".0") + measure.unit
        print(f"{mark}{measure.title:<46}{value:>9}   {measure.allowed}".rstrip())
        if not measure.holds:
            for example in measure.examples[:shown]:
                print(f"      {example}")
    return int(not all(measure.holds for measure in measures))


if __name__ == "__main__":
    sys.exit(main())
