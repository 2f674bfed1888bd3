"""Chat templates: what models write works, and whatever costs time or memory has an end, whatever it is written with."""

from __future__ import annotations

import resource
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meta_executor.engine import templates
from meta_executor.engine.templates import ChatTemplate, TooMuchWork

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello\n there "},
    {"role": "assistant", "content": "Hi", "tool_calls": [{"name": "f", "arguments": {"a": [1, 2.5, None, True]}}]},
    {"role": "user", "content": [{"type": "text", "text": "part <one>"}, {"type": "image"}]},
]

#: What templates of the field are made of, each beside what plain jinja makes of it.
ORDINARY = [
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m.content | string | trim) + '<|im_end|>\n' }}{% endfor %}",
    "{%- if messages[0].role == 'system' -%}{%- set rest = messages[1:] -%}{%- else -%}{%- set rest = messages -%}{%- endif -%}"
    "{{ rest | length }}{{ rest[-1]['role'] }}{{ messages[::-1][0].role }}",
    "{% for m in messages if m.role != 'system' %}{{ loop.index0 }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
    "{{ loop.previtem.role if loop.previtem is defined }}{% else %}none{% endfor %}",
    "{% set ns = namespace(seen=false, text='') %}{% for m in messages | reverse %}{% if m.role == 'user' and not ns.seen %}"
    "{% set ns.seen = true %}{% set ns.text = ns.text ~ m.role ~ 1 ~ none %}{% endif %}{% endfor %}{{ ns.text }}",
    "{% macro show(x, depth=0) %}{% if x is mapping %}{% for k, v in x.items() %}{{ '  ' * depth }}{{ k }}:"
    "{{ show(v, depth + 1) }}{% endfor %}{% elif x is iterable and x is not string %}{% for v in x %}"
    "{{ show(v, depth + 1) }}{% endfor %}{% else %}{{ x }};{% endif %}{% endmacro %}{{ show(messages[2]) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | rejectattr('tool_calls', 'defined') | map(attribute='role') | unique | list }}",
    "{{ messages[2].tool_calls | tojson }}{{ messages[2] | tojson(indent=4) }}{{ messages[2].tool_calls[0] | dictsort }}",
    "{% if 'tool_calls' in messages[2] and 'Hi' in messages[2].content and messages[2].content not in ['a'] %}yes{% endif %}",
    "{{ messages[1].content.split('\n')[-1].strip().upper() }}{{ 'a,b'.split(',') | join('+') }}{{ 'x'.join(['a', 'b']) }}"
    "{{ messages[1].content.startswith('He') }}{{ 'aXbX'.replace('X', '--') }}{{ 'aXbX' | replace('X', 'yy', 1) }}",
    "{{ '%s is %05.1f%%' % ('a', 12.25) }}{{ '%s-%s' | format(1, 2) }}{{ '{:>6}|{!r}|{}'.format('a', 'b', messages[0].role) }}",
    "{{ 'a' | center(7) }}{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent(2, true) }}"
    "{{ 'abcdefghijkl' | truncate(4, true, '', 0) }}{{ 'k'.ljust(4) }}{{ '7'.zfill(3) }}",
    "{{ 7 is odd }}{{ 8 is even }}{{ 9 is divisibleby 3 }}{{ 1 in range(3) }}{{ 2 in [1, 2] | map('abs') }}"
    "{{ {('a', 1): 2}[('a', 1)] }}{{ {}.get('a', 'b') }}{{ {}.fromkeys([1, 2]) }}{{ dict([('a', 1)]) }}"
    "{{ [[1], [2]] | sum(start=[]) }}{{ [1] | batch(3, 0) | list }}{{ 2.5 | round(0, 'ceil') }}"
    "{{ messages[0].values() | list }}{{ messages | sort(attribute='role') | map(attribute='role') | first }}",
    "{{ 7 // 2 }}{{ 7 % 2 }}{{ 7 / 2 }}{{ 7 - 2.5 }}{{ 2 ** 5 }}"
    "{{ [1] + [2] }}{{ 3 * 'ab' }}{{ -5 | abs }}{{ 3.14159 | round(2) }}",
    "{% for m in messages recursive %}{% if m is string %}{{ m }}{% elif m.content is string %}"
    "{{ loop([m.content]) }}{% endif %}{% endfor %}",
    "{% set x %}{% filter upper %}in a block{% endfilter %}{% endset %}{{ x }}{% call(y) show2('q') %}{{ y }}{% endcall %}"
    "{% macro show2(z) %}{{ caller(z) }}{% endmacro %}",
    "{% block b %}{{ messages | length }}{% endblock %}{{ self.b() }}{{ cycler('a', 'b').next() }}{{ dict(a=1).get('a') }}"
    "{{ range(3) | list }}{{ [3, 1, 2] | sort | first }}{{ [3, 1] | sum }}{{ [1, 2, 3] | batch(2) | list }}{{ 'a<b' | e }}",
    "{{ undefined_name }}{{ undefined_name | default('fallback') }}{{ messages[0].get('none', 5) }}"
    "{{ messages[9] is undefined }}"
    "{{ 1 < 2 <= 2 != 3 }}{{ 'abc'[1:] }}{{ 'abc'[:-1] }}{{ 'ab' is in ['ab'] }}{{ not true }}{{ 1 if false }}",
]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_what_templates_are_made_of_is_what_jinja_makes_of_it(text: str) -> None:
    """The rewritten tree says the same, character by character; also where jinja raises."""
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    variables = {"messages": MESSAGES}
    try:
        expected = plain.from_string(text).render(variables)
    except jinja2.TemplateError as error:
        with pytest.raises(type(error)):
            ChatTemplate(text).render(variables)
    else:
        assert ChatTemplate(text).render(variables) == expected


def test_a_long_conversation_is_no_hostile_one() -> None:
    """What a template may spend grows with what it is given: ten thousand messages, and one of eight million characters."""
    body = ORDINARY[0].replace("{% for", "{% if not messages %}x{% endif %}{% for")
    many = [{"role": "user", "content": "yes"} for _ in range(10_000)]
    assert len(ChatTemplate(body).render({"messages": many})) > 10_000 * 20
    assert len(ChatTemplate(body).render({"messages": [{"role": "user", "content": "word " * 1_600_000}]})) > 7_000_000


#: A text or list that doubles forty times.
_DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(40) %}{% set ns.x = STEP %}{% endfor %}"

ENDLESS = {
    "a conversion's width": "{{ '%2000000000d' % 1 }}",
    "a conversion's precision": "{{ '%.2000000000f' % 1.5 }}",
    "a width that is a variable": "{{ '%*d' % (2000000000, 1) }}",
    "a named conversion's width": "{{ '%(a)2000000000d' % {'a': 1} }}",
    "many conversions of much": "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "the filter format": "{{ '%2000000000d' | format(1) }}",
    "str.format": "{{ '{:2000000000}'.format(1) }}",
    "str.format, nested": "{{ '{:{}}'.format(1, 2000000000) }}",
    "format_map": "{{ '{a:2000000000}'.format_map({'a': 1}) }}",
    "escaped format": "{{ ('{:2000000000}' | safe).format(1) }}",
    "str.format of much": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "center": "{{ 'a' | center(2000000000) }}",
    "a method's width": "{{ 'a'.ljust(2000000000) }}",
    "zeros": "{{ '1'.zfill(2000000000) }}",
    "tabs": "{{ '\t'.expandtabs(2000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(2000000000, 'big') }}",
    "bytes' methods": "{{ 'a'.encode().ljust(2000000000) }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000) }}",
    "indent by a text": "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "tojson": "{{ [[1]] | tojson(indent=2000000000) }}",
    "tojson, deep": "{% set ns = namespace(x=range(50000) | list) %}{% for i in range(500) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{{ ns.x | tojson(indent=1000) }}",
    "round": "{{ 1.5 | round(2000000000, 'ceil') }}",
    "slice": "{{ [] | slice(2000000000) | list }}",
    "batch": "{{ [1] | batch(2000000000, 1) | list }}",
    "replace": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "the method replace": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "join": "{{ range(100000) | join('y' * 100000) }}",
    "join, by name": "{{ range(100000) | join(d='y' * 100000) }}",
    "the method join": "{{ ('y' * 100000).join('x' * 100000) }}",
    "the method join of one thing": "{{ ''.join(['x' * 1000000] * 100000) }}",
    "doubling with ~": _DOUBLED.replace("START", "'x'").replace("STEP", "ns.x ~ ns.x"),
    "doubling with +": _DOUBLED.replace("START", "'x'").replace("STEP", "ns.x + ns.x"),
    "doubling a list": _DOUBLED.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "doubling with %": _DOUBLED.replace("START", "'x'").replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "a list in itself, printed": _DOUBLED.replace("START", "[]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a list in itself, as JSON": _DOUBLED.replace("START", "[]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "a list in itself, joined": _DOUBLED.replace("START", "[]").replace("STEP", "[ns.x, ns.x]") + "{{ '' ~ ns.x }}",
    "lists in themselves, compared": _DOUBLED.replace("START", "[]").replace("STEP", "[ns.x, ns.x]")
    + "{% set a = ns.x %}" + _DOUBLED.replace("START", "[]").replace("STEP", "[ns.x, ns.x]") + "{{ a == ns.x }}",
    "a mapping in itself": _DOUBLED.replace("START", "{}").replace("STEP", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x | string }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that take nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a loop over much text": "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "a loop that prints much": "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "a loop that compares much": "{% set x = 'x' * 1000000 %}{% set y = x ~ '' %}{% for a in range(99999) %}"
    "{% if x == y %}{% endif %}{% endfor %}",
    "a loop that looks for much": "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ 'y' in x }}{% endfor %}",
    "a loop that cuts much": "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "a loop that counts much": "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{% set y = x.count('y') %}{% endfor %}",
    "a loop that tests much": "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ x is upper }}{% endfor %}",
    "a loop of its own": "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "macros that call twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "blocks that call twice": "{% block b %}{% if n is undefined %}{{ self.b() }}{{ self.b() }}{% endif %}{% endblock %}",
    "filters on filters": "{% for a in range(99999) %}{% set y = range(99999)" + " | select" * 50 + " | list %}{% endfor %}",
    "numbers": "{% set ns = namespace(x=2 ** 16000) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "numbers from a text": "{% set x = ('f' * 1000000) | int(base=16) %}{{ x // (x - 1) }}",
    "numbers from a text, in a test": "{% set x = ('f' * 1000000) | int(base=16) %}{{ x is divisibleby(x - 1) }}",
    "a width that is a variable, after many zeros": "{{ '%000000000000000000000000*d' % (1500000000, 1) }}",
    "a width in digits of another script": "{{ '{:٢٠٠٠٠٠٠٠٠٠}'.format(1) }}",
    "a text that is odd": "{{ '%1500000000d' is odd }}",
    "a text that is even": "{{ '%1500000000d' is even }}",
    "a text that can be divided": "{{ '%1500000000d' is divisibleby 3 }}",
    "rounding, in a loop": "{% for a in range(99999) %}{{ (a + 1) | round(1000000, 'ceil') }}{% endfor %}",
    "rounding to the left": "{% for a in range(99999) %}{{ (a + 1) | round(-1000000) }}{% endfor %}",
    "batches that are filled up": "{% for a in range(99999) %}{% set y = [1] | batch(1000000, 1) | list %}{% endfor %}",
    "slices of which one is taken": "{% for a in range(99999) %}{{ range(100000) | slice(50000) | first }}{% endfor %}",
    "sums of lists": "{{ ([[1]] * 10000) | sum(start=[]) | length }}",
    "paths": "{% set ns = namespace() %}{% set ns.x = ns %}"
    "{{ ([ns] * 5000) | map(attribute=('x.' * 50000) ~ 'x') | list | length }}",
    "paths in order": "{% set ns = namespace(y=1) %}{% set ns.x = ns %}"
    "{{ ([ns] * 5000) | sort(attribute=('x.' * 50000) ~ 'y') | length }}",
    "a loop that looks in a range": "{% for a in range(99999) %}{{ 'x' in range(100000) }}{% endfor %}",
    "a loop that tests a range": "{% for a in range(99999) %}{{ 'x' is in(range(100000)) }}{% endfor %}",
    "much that is looked for among much": "{% set x = 'x' * 100000 %}{{ x in ([x[1:] ~ 'y'] * 1000) | map('default') }}",
    "much that is tested among much": "{% set x = 'x' * 100000 %}{{ x is in(([x[1:] ~ 'y'] * 1000) | map('default')) }}",
    "a loop that calls with much": "{% macro f() %}{% if varargs is none %}{% endif %}{% endmacro %}"
    "{% for a in range(99999) %}{{ f(*range(100000)) }}{% endfor %}",
    "keys without keys": "{% set x = {}.fromkeys(range(100000)) %}{% for a in range(99999) %}"
    "{{ x.keys() - x.keys() }}{% endfor %}",
    "what stands before anything runs": "{{ 'a' | center(2000000000) | length }}",
    "a filter that has no bound": "{{ lipsum(n=100000) }}",
}  # fmt: skip


_LIST = _DOUBLED.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{% set a = ns.x %}"
_LISTS = _LIST + _LIST.replace("set a", "set b")
_TUPLE = _LIST.replace("[1]", "(1,)").replace("[ns.x, ns.x]", "(ns.x, ns.x)")

#: A list or tuple that is short to write and endless to read, and what reads it.
IN_ITSELF = {
    "values of mappings": _DOUBLED.replace("START", "1").replace("STEP", "dict(x=ns.x, y=ns.x).values()")
    + "{{ ns.x }}",
    "values, in order": _LISTS + "{{ dict(x=a, y=b).values() | sort | length }}",
    "members, in order": _LISTS + "{{ [a, b] | reverse | sort | length }}",
    "the key of a mapping": _TUPLE + "{{ {a: 1} | length }}",
    "a subscript": _TUPLE + "{{ {}[a] }}",
    "the words about a subscript": _LIST + "{{ [][a].x }}",
    "the words about an attribute": _LIST + "{{ ([[]] | map(attribute=a) | first).x }}",
    "a name of an attribute": _TUPLE + "{{ {} | attr(a) }}",
    "a name of a filter": _TUPLE + "{{ a is filter }}",
    "a name of a test": _TUPLE + "{{ a is test }}",
    "get": _TUPLE + "{{ {}.get(a) }}",
    "fromkeys": _TUPLE + "{{ {}.fromkeys([a] | reverse) | length }}",
    "dict": _TUPLE + "{{ dict([(a, 1)]) | length }}",
    "an exception's words": _LIST + "{{ raise_exception(a) }}",
    "the filter format": _LIST + "{{ a | format(1) }}",
    "the filter safe": _LIST + "{{ a | safe | length }}",
    "the method replace": _LIST + "{{ 'x'.replace(a, a) }}",
}


def test_a_namespace_in_itself_is_written_without_what_is_in_it() -> None:
    """Else it would be as endless as a list in itself."""
    text = _DOUBLED.replace("START", "1").replace("STEP", "namespace(x=ns.x, y=ns.x)") + "{{ ns.x }}"
    assert ChatTemplate(text).render({}) == "<Namespace>"


@pytest.mark.parametrize("text", IN_ITSELF.values(), ids=IN_ITSELF.keys())
def test_what_reads_a_list_in_itself_pays_for_all_of_it(text: str) -> None:
    """Whoever goes through it, in whatever way; the words of an error that are made later are short."""
    with pytest.raises(TooMuchWork):
        ChatTemplate(text).render({})


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_would_take_time_or_memory_without_end_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by an error that a client can be told, before the memory is taken: a fraction of what the template asks for."""
    monkeypatch.setattr(templates, "WORK_MAX", 1 << 16)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((jinja2.TemplateError, OverflowError, RecursionError, TypeError, ValueError)) as refused:
        ChatTemplate(text).render({"messages": []})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10
    assert not isinstance(refused.value, jinja2.TemplateSyntaxError)


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("{% for a in range(N) %}{% endfor %}", 3),
        ("{% for a in range(N) %}{{ 'x' * 320 }}{% endfor %}", 30),
        ("{% for a in range(N) %}" + "y" * 320 + "{% endfor %}", 13),
    ],
)
def test_the_bound_is_where_it_is_said_to_be(text: str, units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work for so many turns passes, for twice as many not; each render has all of it again, and more for what it is given."""
    monkeypatch.setattr(templates, "WORK_MAX", 10_000)
    within = ChatTemplate(text.replace("N", str(10_000 // units - 5)))
    beyond = ChatTemplate(text.replace("N", str(20_000 // units)))
    for _ in range(2):
        within.render({})
        with pytest.raises(TooMuchWork, match="more loops, calls or characters"):
            beyond.render({})
    beyond.render({"messages": [{"content": "x" * 10_000}]})
    beyond.render({"messages": ["x"] * 400})


def test_only_filters_and_methods_that_are_known_are_there() -> None:
    """One that a new jinja or Python brings is not there until somebody has looked at what it costs."""
    for text, words in (
        ("{{ 'a' | wordwrap(3) }}", "No filter named 'wordwrap'"),
        ("{{ 'a'.expandtabs() }}", "expandtabs of a str is not for templates"),
        ("{{ (5).conjugate() }}", "conjugate of a int is not for templates"),
        ("{{ ('a' | safe).unescape() }}", "unescape of a str is not for templates"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ raise_exception('as it says') }}", "as it says"),
    ):
        with pytest.raises(jinja2.TemplateError, match=words):
            ChatTemplate(text).render({})
