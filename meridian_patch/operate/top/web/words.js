// What the page says: its charts, and the meaning of each name that a server sends.

const byPhase = {
  answer: "a reader gets its tokens",
  think: "thinks; no reader sees it",
  prefill: "its prompt is computed",
  waiting: "waits in the queue",
  running: "runs, in a phase that stock vLLM does not tell",
};

const byTier = {
  think_complete: "of finished thoughts, which no later prompt holds; evicted first",
  think_active: "of thoughts that were preempted and will go on",
  output_critical: "of what later prompts may begin with; evicted last",
  in_use: "in use by other requests at that moment",
};

const byReason = {
  // Written by scripts/gen_docs.py from the strategies. <!-- reasons -->
  natural: "the model ended its thought itself",
  eat: "closed, its conclusion had settled (EAT)",
  rpdi: "closed, it had become less sure (RPDI)",
  hard_cap: "closed at max_think_tokens",
  budget: "closed by vLLM at thinking_token_budget",
  end_probability: "closed, the model could have ended it",
  loop: "closed, it repeated itself",
  pattern: "closed, it said one of the texts to be closed at",
  answer_reserve: "closed, the rest of max_tokens is kept for the answer",
  unanswered: "the request ended in its thought, without an answer",
  // <!-- /reasons -->
};

// Name -> class of its colour. A name that is not here gets one by its place.
const COLOURS = {
  answer: "green", think: "blue", prefill: "orange", waiting: "grey", running: "purple",
  think_complete: "purple", think_active: "blue", output_critical: "red", in_use: "grey",
  natural: "green", eat: "blue", rpdi: "purple", hard_cap: "red", budget: "orange",
  end_probability: "grey", loop: "pink", pattern: "purple",
  generated: "green", prompt: "orange", "KV cache": "blue", all: "red",
};
const MORE_COLOURS = ["blue", "orange", "green", "purple", "red", "grey", "pink"];

export function colourOf(name, place) {
  return meaningOf(COLOURS, name) ?? MORE_COLOURS[place % MORE_COLOURS.length];
}

// Of a name that a server sent: it may be one that every object has.
export function meaningOf(words, name) {
  return Object.hasOwn(words, name) ? words[name] : undefined;
}

const perSecond = (counts, view) =>
  Object.fromEntries(Object.entries(counts).map(([name, count]) => [name, count / view.window_s]));

const present = (values) =>
  Object.fromEntries(Object.entries(values).filter(([, value]) => value !== null));

// Of each chart: values(point) are drawn, by name; shown(point), or the same, stand in its legend.
export const PHASES = {
  id: "phases",
  title: "Requests by phase",
  unit: "requests",
  words: byPhase,
  values: (point) => point.phases,
};

export const CHARTS = [
  {
    id: "exits",
    title: "Thoughts ended",
    unit: "thoughts per second",
    explained: "Why thinking ended. In mode observe, early exit closes none.",
    words: byReason,
    values: ({ view }) => perSecond(view.exits, view),
    shown: ({ view }) => view.exits,
  },
  {
    id: "evictions",
    title: "KV blocks evicted, by tier",
    unit: "blocks per second",
    explained: "Cached blocks that made room. 'output critical' should stay low: prompts may need those.",
    words: byTier,
    values: ({ view }) => perSecond(view.evictions, view),
    shown: ({ view }) => view.evictions,
  },
  {
    id: "hits",
    title: "Cache hits, by tier",
    unit: "tokens per second",
    explained:
      "Tokens found in the prefix cache. Unlike 'prefix hits', with those of preempted requests that go on.",
    words: byTier,
    values: ({ view }) => perSecond(view.hits, view),
    shown: ({ view }) => view.hits,
  },
  {
    id: "kv",
    title: "KV cache in use",
    unit: "% of its blocks",
    explained: "When it is full, requests wait or are preempted. Of several engines the fullest one.",
    words: { "KV cache": "blocks that requests hold" },
    max: 100,
    values: ({ view }) =>
      view.load.kv_usage === null ? {} : { "KV cache": 100 * view.load.kv_usage },
  },
  {
    id: "tokens",
    title: "Tokens",
    unit: "tokens per second",
    explained: "What the server does with its time.",
    words: { generated: "of thoughts and answers", prompt: "of prompts, cached ones included" },
    values: ({ view }) =>
      present({ generated: view.generated_per_s, prompt: view.prompt_per_s }),
  },
  {
    id: "preemptions",
    title: "Preemptions, by phase",
    unit: "requests per second",
    explained: "Requests that lost their KV blocks and are computed again. 'answer' should stay 0.",
    words: { ...byPhase, all: "in a phase that stock vLLM does not tell" },
    values: ({ view }) => perSecond(preempted(view), view),
    shown: ({ view }) => preempted(view),
  },
];

function preempted({ load }) {
  return Object.keys(load.preemptions).length
    ? load.preemptions
    : present({ all: load.preempted });
}

export const BOTTLENECKS = {
  prefill: "computing prompts holds the server back",
  think: "thinking requests hold the server back",
  answer: "answering requests hold the server back",
  seats: "requests wait for one of the --max-num-seqs places in the batch",
  "plug-in": "a part of meridian_patch failed",
  unknown: "the server does not tell enough",
  none: "nothing holds the server back",
};

export const LATENCIES = {
  "first token": "from arrival to the first token, mostly of a thought",
  "next token": "gap between two tokens of a request",
  "in the queue": "from arrival to the start of prefill",
  "in prefill": "computing the prompt",
  "in decode": "thinking and answering",
  "whole request": "from arrival to the last token",
};

export function tiles({ load, hit_share, generated_per_s, prompt_per_s }) {
  return [
    ["running", count(load.running), "requests in the batch"],
    ["waiting", count(load.waiting), "requests in the queue"],
    ["KV cache", share(load.kv_usage), "of its blocks in use"],
    ["prefix hits", share(hit_share), "of prompt tokens were cached"],
    ["generated", count(generated_per_s), "tokens per second"],
    ["prompts", count(prompt_per_s), "tokens per second"],
  ];
}

export function count(value) {
  if (value === null || value === undefined) return "-";
  const digits = value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function share(value) {
  return value === null ? "-" : `${Math.round(100 * value)} %`;
}

// As `meridian top` writes a latency.
export function latency(seconds) {
  if (seconds === null) return "-";
  const [value, digits, unit] = seconds < 1 ? [1000 * seconds, 1, "ms"] : [seconds, 2, "s"];
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return `${value.toLocaleString("en", format)} ${unit}`;
}

export function quantile({ seconds, side }) {
  return { at: "", below: "< ", above: "> " }[side] + latency(seconds);
}

export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min` + (whole % 60 ? ` ${whole % 60} s` : "");
  return `${Math.floor(whole / 3600)} h` + (whole % 3600 ? ` ${Math.round((whole % 3600) / 60)} min` : "");
}
