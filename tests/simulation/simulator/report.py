"""The page about a campaign, in Markdown."""

import vllm

from simulator.axes import AXES
from simulator.campaign import Campaign, line_of, possible_pairs


def page(campaign: Campaign, seconds: float, command: str) -> str:
    """Steps, axes and pairs met, and what failed."""
    pairs = list(possible_pairs())
    unmet = campaign.unmet_pairs
    fewest = min((campaign.pairs[pair] for pair in pairs), default=0)
    num_values = sum(len(axis.values) for axis in AXES.values())
    lines = [
        f"`{command}`",
        "",
        "| | |",
        "|---|---|",
        f"| vLLM | {vllm.__version__} |",
        f"| seeds | {campaign.cases:,} |",
        f"| seeds that stock vLLM does not serve to the end | {len(campaign.void):,} |",
        f"| steps of ours, each with every check | {campaign.steps:,} |",
        f"| steps of stock on the same seeds | {int(campaign.counts['stock_steps']):,} |",
        f"| requests | {int(campaign.counts['requests']):,} |",
        f"| tokens compared with the oracle | {int(campaign.counts['tokens']):,} |",
        f"| probes made | {int(campaign.counts['probes']):,} |",
        f"| seeds with every step equal to stock's | {int(campaign.counts['compared']):,} |",
        f"| thoughts closed | {int(campaign.counts['closes']):,} |",
        f"| requests displaced | {int(campaign.counts['displaced']):,} |",
        f"| failures | {len(campaign.failed):,} |",
        f"| axis values met | {len(campaign.values):,} of {num_values:,} |",
        f"| pairs that vLLM takes together, met | {len(pairs) - len(unmet):,} of {len(pairs):,} |",
        f"| the rarest pair met | {fewest} times |",
        f"| time | {seconds:.0f} s |",
        "",
        "Cases in which each value of each axis was met:",
        "",
        "| axis | values |",
        "|---|---|",
    ]
    for name, axis in AXES.items():
        met = ", ".join(f"{value}: {campaign.values[name, value]:,}" for value in axis.values)
        lines.append(f"| {name} | {met} |")
    faults = {
        name.removeprefix("fault_"): int(number)
        for name, number in sorted(campaign.counts.items())
        if name.startswith("fault_")
    }
    told = ", ".join(f"{name}: {number:,}" for name, number in faults.items())
    lines += ["", f"Faults that were made: {told}."]
    if campaign.failed:
        lines += ["", "Failures:", ""]
        lines += [f"- {line_of(*pair)}" for pair in campaign.failed]
    if campaign.void:
        lines += ["", "Not served by stock vLLM:", ""]
        lines += [f"- seed {each.case.seed}: {each.message}" for each in campaign.void]
    return "\n".join(lines) + "\n"
