"""A model's chat template, rendered within bounds. The one file that imports jinja2's parts.

A template comes with the weights, and a client fills it. jinja's sandbox keeps both from reaching into Python; it bounds
neither time nor memory: widths, repetitions, loops in loops and a text that is joined to itself are a line each. So every
render has an amount of work to spend (:class:`_Work`), and whatever costs spends before it is done:

- loops, macros and blocks are rewritten when the template is parsed: each turn spends as much as its body is long;
- ``~``, comparisons, slices and keys, which compile to Python without asking anybody, become calls of the environment;
- operators, calls, filters and tests are this environment's own. Of filters and methods only those exist that are named here.

A unit is about a call, or 32 characters made or read. Whatever is printed, compared or used as a key is measured through and
through, because a list that holds another twice, forty times over, is short to write and endless to read.
"""

from __future__ import annotations

import contextvars
import functools
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

#: What compiling a template may spend, and each render (units); a render has more for what it is given.
WORK_MAX: Final = 1 << 18
#: More for each value of messages and variables, beside one for each character (units).
WORK_PER_VALUE: Final = 32
#: Largest number that a template may compute (bits); Python writes none of more than 14,284 bits (4,300 digits) as text.
NUMBER_BITS_MAX: Final = 1 << 14
#: Longest text or list that a template may make by repetition, and the largest width (count).
REPEATED_MAX: Final = 1 << 20
_CHARACTERS_PER_UNIT: Final = 32
_NODES_PER_UNIT: Final = 8
#: jinja's filters that are kept: what they make is bounded by what they are given, or looked at below before they run.
_FILTERS: Final = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "filesizeformat",
    "first", "float", "forceescape", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map",
    "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort",
    "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip
#: Of these what is inside their argument does not matter: they look at it once, or hand its members on.
_SHALLOW: Final = frozenset((
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr", "slice",
))  # fmt: skip
#: Filters whose whole numbers are widths, counts or digits.
_SIZED: Final = frozenset(("batch", "center", "indent", "round", "slice", "tojson", "truncate"))
_COMPARING: Final = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "filter", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower",
    "lt", "ne", "test", "upper",
))  # fmt: skip
#: Methods of texts and numbers that a template may call; of lists and mappings all that the sandbox allows.
_METHODS: Final = {
    str: frozenset((
        "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
        "upper", "zfill",
    )),
    bytes: frozenset(("decode",)),
    int: frozenset(("bit_length",)),
    float: frozenset(("is_integer",)),
}  # fmt: skip
#: Filters that take every member before they hand out one.
_GATHERING: Final = frozenset(("groupby", "join", "max", "min", "sort", "sum", "unique"))
#: Of every script: ``str.format`` takes them all.
_DIGITS: Final = re.compile(r"\d+")
_STARRED: Final = re.compile(r"[%)][-+ #0-9.]*\*")


class TooMuchWork(JinjaError):
    """A template would cost more time or memory than it has."""


class _Work:
    """What is left of one render's work."""

    __slots__ = ("left",)

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int = 1) -> None:
        self.left -= units
        if self.left < 0:
            raise TooMuchWork("it takes more loops, calls or characters than a template has")


_work: contextvars.ContextVar[_Work] = contextvars.ContextVar("_work")


def _spend(units: int = 1) -> None:
    _work.get().spend(units)


def _spend_characters(count: int) -> None:
    _spend(1 + count // _CHARACTERS_PER_UNIT)


def _spend_shallow(value: Any) -> None:
    _spend_characters(len(value) if isinstance(value, str | bytes | list | tuple | dict | set) else 0)


def _spend_deep(value: Any, indent: int = 0) -> int:
    """Measure a value through and through, spending on the way. Returns its characters, roughly."""
    work, total, todo = _work.get(), 0, [(value, 1)]
    while todo:
        one, depth = todo.pop()
        size = len(one) if isinstance(one, str | bytes) else 8 + indent * depth
        work.spend(1 + size // _CHARACTERS_PER_UNIT)
        total += size
        if isinstance(one, Mapping):
            todo += ((part, depth + 1) for item in one.items() for part in item)
        elif isinstance(one, list | tuple | set | frozenset | ItemsView | KeysView | ValuesView):
            todo += ((part, depth + 1) for part in one)
        elif isinstance(one, int):
            work.spend(one.bit_length() // 64)
            total += one.bit_length() // 3
    return total


def _sized(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > REPEATED_MAX:
            raise OverflowError(f"a width, count or number of digits is more than {REPEATED_MAX}")


# -- operators ----------------------------------------------------------------------------------------------------------


def _numbers(left: Any, right: Any) -> None:
    for value in (left, right):
        if isinstance(value, int) and value.bit_length() > NUMBER_BITS_MAX:
            raise OverflowError(f"a number has more than {NUMBER_BITS_MAX} bits")


def _operator(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def computed(left: Any, right: Any) -> Any:
        if any(isinstance(one, ItemsView | KeysView | ValuesView) for one in (left, right)):
            raise SecurityError("nothing is computed with the keys, values or items of a mapping")
        _numbers(left, right)
        _spend_shallow(left)
        _spend_shallow(right)
        return compute(left, right)

    return computed


def _power(base: Any, exponent: Any) -> Any:
    """A power, of no more bits than :data:`NUMBER_BITS_MAX`: a larger one takes for ever, and the memory too."""
    _spend()
    if isinstance(base, int) and isinstance(exponent, int) and exponent * base.bit_length() > NUMBER_BITS_MAX:
        raise OverflowError(f"a power has more than {NUMBER_BITS_MAX} bits")
    return base**exponent


def _product(left: Any, right: Any) -> Any:
    """A number of no more than :data:`NUMBER_BITS_MAX` bits, or a text or list that is repeated to no more than
    :data:`REPEATED_MAX` characters or items."""
    _spend()
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > NUMBER_BITS_MAX:
            raise OverflowError(f"a product has more than {NUMBER_BITS_MAX} bits")
    else:
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | bytes | list | tuple) and isinstance(times, int):
                if len(repeated) * times > REPEATED_MAX:
                    raise OverflowError(f"a text or list is repeated to more than {REPEATED_MAX} characters or items")
                _spend_characters(len(repeated) * max(times, 0))
    return left * right


def _remainder(left: Any, right: Any) -> Any:
    """Of numbers; or a text's conversions, filled in."""
    _numbers(left, right)
    if isinstance(left, bytes):
        raise SecurityError("bytes are not filled in")
    if isinstance(left, str):
        if _STARRED.search(left):
            raise OverflowError("a conversion's width is a variable")
        _spend_characters(len(left) + _widths(left) + left.count("%") * _spend_deep(right))
    return left % right


def _widths(text: str) -> int:
    """The sum of the numbers in a conversion, each of them bounded."""
    total = 0
    for digits in _DIGITS.findall(text):
        _sized([int(digits[:20])])
        total += int(digits)
    return total


# -- filters, tests and methods ------------------------------------------------------------------------------------------


def _counted(made: Any, each: int = 0) -> Any:
    """What was made, paid for; of what makes its members when they are asked for, each when it is, and ``each`` beside it."""
    if isinstance(made, Iterator):
        return _members(made, each)
    if isinstance(made, int) and made.bit_length() > NUMBER_BITS_MAX:
        raise OverflowError(f"a number has more than {NUMBER_BITS_MAX} bits")
    _spend_shallow(made)
    return made


def _members(made: Iterator[Any], each: int) -> Iterator[Any]:
    for member in made:
        _spend(each)
        _spend_shallow(member)
        yield member


def _measured(made: Iterator[Any]) -> Iterator[Any]:
    for member in made:
        _spend_deep(member)
        yield member


def _sought(value: Any) -> Any:
    """What something is looked for in: a mapping does not look at its members."""
    if isinstance(value, Iterator):
        return _measured(value)
    if isinstance(value, range):
        # Of what is no whole number each member is looked at.
        _spend_characters(len(value))
    elif not isinstance(value, Mapping | set):
        _spend_deep(value)
    return value


def _replacing(text: str, old: Any, new: Any, count: Any = -1) -> None:
    """Spend what replacing makes."""
    old, new = str(old), str(new)
    times = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    _spend_characters(len(text) + times * len(new))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    context = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        ahead, (value, *others) = arguments[:context], arguments[context:]
        settings = [*others, *named.values()]
        if name in _SIZED:
            _sized(settings)
        if name in _GATHERING and isinstance(value, Iterator | ItemsView | KeysView | ValuesView):
            value = list(value)
        width = max([4, *(abs(one) for one in settings if isinstance(one, int))]) if name in _SIZED else 0
        if name not in _SHALLOW:
            size = _spend_deep(value, width if name == "tojson" and settings else 0)
        elif isinstance(value, range | ItemsView | KeysView | ValuesView):
            _spend_characters(len(value))
        else:
            _spend_shallow(value)
        _spend_deep(settings)
        # An attribute's path is followed for each member.
        each = sum(one.count(".") for one in settings if isinstance(one, str))
        if name in _GATHERING and isinstance(value, str | list | tuple | dict):
            _spend(len(value) * (1 + each))
        if name == "sum" and isinstance(value, list | tuple) and any(isinstance(one, list | tuple) for one in settings):
            # Each sum is a list of its own.
            _spend_characters(len(value) * size)
        elif name == "round":
            _spend_characters(width)
        elif name == "indent":
            given = [len(one) for one in settings if isinstance(one, str)]
            _spend_characters((str(value).count("\n") + 1) * max([width, *given]))
        elif name == "center":
            _spend_characters(max([80, width]))
        elif name == "join":
            between = named.get("d", others[0] if others else "")
            value = value if isinstance(value, list | tuple | str | dict) else list(value)
            _spend_characters(len(value) * len(str(between)))
        elif name == "replace":
            _replacing(str(value), *others[:3], **{key: named[key] for key in ("old", "new", "count") if key in named})
        return _counted(function(*ahead, value, *others, **named), each)

    return bounded


def _bounded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    context = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        _spend()
        if name in _COMPARING:
            for value in (*arguments[context:], *named.values()):
                _spend_deep(value)
        if name == "in" and len(arguments) == 2:
            arguments = (arguments[0], _sought(arguments[1]))
        return function(*arguments, **named)

    return bounded


def _divisible(value: Any, num: Any) -> bool:
    """Also of a text, as in jinja: then it is one with conversions."""
    return bool(_remainder(value, num) == 0)


def _percent(value: Any, *arguments: Any, **named: Any) -> Any:
    """jinja's ``format`` filter."""
    _spend_deep(value)
    if arguments and named:
        raise JinjaError("format takes arguments in order or by name, not both")
    return _remainder(str(value), named or arguments)


class _Namespace(Namespace):
    """jinja's; it is written without what is in it, which may be itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Formatter(SandboxedFormatter):
    """``str.format`` with bounded widths."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _spend_characters(_widths(format_spec) + _spend_deep(value))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion:
            _spend_deep(value)
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for escaped text."""


# -- the rewritten template ----------------------------------------------------------------------------------------------


class _Rewriter(NodeTransformer):
    """Puts what spends into a template's tree; see the module's text."""

    def __init__(self, environment: ImmutableSandboxedEnvironment) -> None:
        self._environment = environment

    def _call(self, at: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Call:
        made = nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
        made.set_lineno(at.lineno, override=False)
        made.set_environment(self._environment)
        return made

    def _turn(self, node: Any) -> nodes.Call:
        """One turn of a body, for as many units as it is long."""
        size = sum(
            1 + _NODES_PER_UNIT * len(one.data) // _CHARACTERS_PER_UNIT if isinstance(one, nodes.TemplateData) else 1
            for part in node.body
            for one in (part, *part.find_all(nodes.Node))
        )
        return self._call(node, "turn", nodes.Const(1 + size // _NODES_PER_UNIT))

    def _begins_with_turn(self, node: Any) -> Any:
        turn = self._turn(node)
        self.generic_visit(node)
        statement = nodes.ExprStmt(turn)
        statement.set_lineno(node.lineno)
        statement.set_environment(self._environment)
        node.body.insert(0, statement)
        return node

    def visit_For(self, node: nodes.For) -> Any:
        if node.test is not None:
            node.test = nodes.And(self._call(node, "turn", nodes.Const(1)), node.test)
            node.test.set_lineno(node.lineno)
            node.test.set_environment(self._environment)
        return self._begins_with_turn(node)

    visit_Macro = visit_CallBlock = visit_Block = _begins_with_turn

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return self._call(node, "joined", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> Any:
        self.generic_visit(node)
        node.expr = self._call(node, "compared", node.expr)
        for operand in node.ops:
            among = operand.op in ("in", "notin")
            operand.expr = self._call(node, "sought" if among else "compared", operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> Any:
        self.generic_visit(node)
        node.key = self._key(node.key)
        return node

    def _key(self, key: nodes.Expr) -> nodes.Expr:
        """A key is hashed, and written where it is not there; both go through all that it holds."""
        return key if isinstance(key, nodes.Const) else self._call(key, "compared", key)

    def visit_Getitem(self, node: nodes.Getitem) -> Any:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = self._key(node.arg)
            return node
        bounds = [
            nodes.Const(None) if bound is None else bound for bound in (node.arg.start, node.arg.stop, node.arg.step)
        ]
        return self._call(node, "sliced", node.node, *bounds)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, in which everything costs."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        # Not optimised: that takes the cube of an expression's depth, and computes while it compiles.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self.printed)
        self.filters = {name: _bounded_filter(name, FILTERS[name]) for name in _FILTERS} | {"format": _percent}
        tests: Mapping[str, Any] = TESTS
        own = {
            "divisibleby": _divisible,
            "even": lambda value: _remainder(value, 2) == 0,
            "odd": lambda value: _remainder(value, 2) == 1,
        }
        self.tests = {name: _bounded_test(name, function) for name, function in {**tests, **own}.items()}
        self.globals = {name: self.globals[name] for name in ("cycler", "dict", "joiner", "range")}
        self.globals |= {"namespace": _Namespace, "raise_exception": _raise_exception}
        self.binop_table = {sign: _operator(compute) for sign, compute in self.default_binop_table.items()}
        self.binop_table |= {"**": _power, "*": _product, "%": _remainder}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Rewriter(self).visit(super()._parse(source, name, filename))
        return tree

    @staticmethod
    def turn(units: int) -> bool:
        _spend(units)
        return True

    @staticmethod
    def printed(value: Any) -> Any:
        _spend_deep(value)
        return value

    @staticmethod
    def joined(*parts: Any) -> str:
        for part in parts:
            _spend_deep(part)
        return "".join(map(str, parts))

    @staticmethod
    def compared(value: Any) -> Any:
        _spend_deep(value)
        return value

    @staticmethod
    def sought(value: Any) -> Any:
        return _sought(value)

    @staticmethod
    def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
        _spend_shallow(value)
        return value[start:stop:step]

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None
        kind = type(owner)
        formatter = _EscapeFormatter(self, escape=Markup.escape) if isinstance(owner, Markup) else _Formatter(self)

        def wrapped(*arguments: Any, **named: Any) -> str:
            if name == "format_map":
                (named,), arguments = arguments, ()
            _spend_shallow(owner)
            return kind(formatter.vformat(owner, arguments, named))

        return wrapped

    def call(__self, __context: Any, __callable: Any, *arguments: Any, **named: Any) -> Any:
        _spend_characters(len(arguments) + len(named))
        owner = getattr(__callable, "__self__", None)
        name = getattr(__callable, "__name__", "")
        for kind, allowed in _METHODS.items():
            if isinstance(owner, kind) and name not in allowed:
                raise SecurityError(f"{name} of a {kind.__name__} is not for templates")
        if isinstance(owner, str):
            arguments = __self._before_method(owner, name, arguments)
        elif isinstance(owner, list | tuple):
            _spend_deep([owner, arguments])
        elif isinstance(owner, dict) or owner is dict or __callable is dict:
            # They may be keys.
            arguments = tuple(list(one) if isinstance(one, Iterator) else one for one in arguments)
            _spend_deep(arguments)
        elif name == "changed":
            _spend_deep(arguments)
        return _counted(super().call(__context, __callable, *arguments, **named))

    @staticmethod
    def _before_method(text: str, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Spend what a text's method costs. Returns its arguments: what can be gone through only once is a list then."""
        _spend_shallow(text)
        _spend_deep(arguments)
        if name in ("center", "ljust", "rjust", "zfill"):
            _sized(arguments[:1])
            _spend_characters(max([0, *(one for one in arguments[:1] if isinstance(one, int))]))
        elif name == "replace":
            if len(arguments) >= 2:
                _replacing(text, *arguments[:3])
        elif name == "join" and arguments:
            parts = arguments[0] if isinstance(arguments[0], str) else list(arguments[0])
            _spend_deep(parts)
            _spend_characters(len(text) * len(parts))
            return (parts, *arguments[1:])
        return arguments


def _raise_exception(message: Any) -> None:
    _spend_deep(message)
    raise JinjaError(str(message))


class ChatTemplate:
    """A template that was read.

    Args:
        text: As the model's file has it.

    Raises:
        jinja2.TemplateError: It is none. Others that the interpreter raises for a text that is too deep pass through.
    """

    def __init__(self, text: str) -> None:
        token = _work.set(_Work(WORK_MAX))
        try:
            self._template = _Environment().from_string(text)
        finally:
            _work.reset(token)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text.

        Raises:
            TooMuchWork: It would cost more than a template has: :data:`WORK_MAX` units, and more for what it is given.
            OverflowError: A number, a width or a repetition is too large.
            jinja2.TemplateError: Any other fault of the template's; what it computes may raise errors of its own.
        """
        token = _work.set(_Work(WORK_MAX + _given(variables)))
        try:
            return str(self._template.render(variables))
        finally:
            _work.reset(token)


def _given(variables: Mapping[str, Any]) -> int:
    """Units for what a template is given."""
    units, todo = 0, list(variables.values())
    while todo:
        one = todo.pop()
        units += WORK_PER_VALUE + (len(one) if isinstance(one, str) else 0)
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple):
            todo += one
    return units
