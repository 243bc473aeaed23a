// Scores of search results: guides come first, records of changes and measurements last.
var Scorer = {
  // Sphinx's own scores
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([page, , , , score]) => {
    const query = new URLSearchParams(location.search).get("q") || "";
    if (page === "docs/troubleshooting") {
      return score + (query.trim().split(/\s+/).length > 2 ? 20 : 3); // 20: probably a message
    }
    if (
      /^(CHANGELOG|CONTRIBUTING)$/.test(page) ||
      /^docs\/(benchmarks|decisions|developers|inside_chainer_compat|releasing|test_results|reference\/by_module)$/.test(page)
    )
      return score - 12;
    if (/^docs\/(install|tutorial)$/.test(page))
      return score + (/\b(gpus?|install|start)/i.test(query) ? 12 : 4);
    return /^docs\/(?!contents$|index$)\w+$/.test(page) ? score + 4 : score;
  },
};
