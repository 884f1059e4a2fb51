"""Renders docs/model-families.md from the family files."""

from meridian_patch.config.family_files import load_families
from meridian_patch.config.family_schema import Family, History

_HEAD = """\
# Model families: what becomes of earlier thinking

<!-- Generated from configs/families by scripts/gen_docs.py: do not edit. -->

A chat template decides whether the next prompt of a conversation holds earlier turns' thinking.
Where it does not, neither the thought nor the answer behind it can be hit again in the KV cache,
so their blocks are evicted first once the request has finished.

- `strip`: the next prompt holds no earlier thinking, not even inside a tool loop.
- `keep_in_tool_loop`: it holds the thinking of a tool loop that goes on. Outputs in which a
  tool-call marker is seen are kept, other outputs are evicted first.
- `keep`: it holds all thinking that the client sends back. Outputs are kept as stock vLLM does.
- `unverified`: not known. Outputs are kept as stock vLLM does.

The rule is the template's default. A client may have its thoughts kept: a request's
`chat_template_kwargs` (`preserve_thinking`, `clear_thinking`, `truncate_history_thinking`,
`drop_thinking`) and `meridian_history` count for that request, and without them what prompts show:
a prompt that goes on with the thought of its turn before keeps it, and one that goes on without it
does not. First turns, which show nothing, follow the rule, or keep their thoughts while a quarter
of such prompts did lately.

A wrong rule costs cache hits, never correctness. `kv.history` sets the rule of one server. To
change a family, put a file of its name with `replaces: true` into a directory of your own and set
`families_dir` to it; [its keys](configuration.md#families) hold the rule and what shows it.
`verified`: read in the model's own template, a copy without visible changes, or vLLM's renderer.
`third_party`: read in a changed copy, or as others quote it.

| family | history | tool-call markers | line | read in | note |
|---|---|---|---|---|---|
"""

_ORDER: tuple[History, ...] = ("strip", "keep_in_tool_loop", "keep", "unverified")


def render_families() -> str:
    """The whole page, as Markdown; rows by history rule, then by name."""
    families = [file.family for file in load_families().values()]
    families.sort(key=lambda family: (_ORDER.index(family.history), family.family))
    return _HEAD + "".join(map(_row, families))


def _row(family: Family) -> str:
    evidence = family.history_evidence
    cells = (
        _code(family.family),
        _code(family.history),
        " ".join(map(_code, family.tool_call)),
        _code(evidence.line) if evidence and evidence.line else "",
        f"{evidence.source} ({evidence.provenance})" if evidence else "",
        evidence.note if evidence else "",
    )
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |\n"


def _code(text: str) -> str:
    """As code, also if the text contains backquotes."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def _escaped(cell: str) -> str:
    """With line breaks and bars escaped, because they would end the table's cell."""
    return cell.strip().replace("\n", "\\n").replace("|", "\\|")
