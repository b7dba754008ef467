"""The suffix automaton knows what a brute-force search of the text finds."""

from hypothesis import given, settings
from hypothesis import strategies as st
from occurrences import ends_of, followers, longest_match, most_frequent
from strength import examples

from runtime.drafters.automaton import MAX_COUNTED, SuffixAutomaton

runs = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(runs=runs, max_counted=st.sampled_from([2, 3, 5, MAX_COUNTED]))
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_automaton_equals_brute_force(runs: list[list[int]], max_counted: int) -> None:
    """The longest repeated end, occurrences of every pattern, and each one's followers, after every run."""
    automaton, text = SuffixAutomaton(max_counted), list[int]()
    for run in runs:
        for token in run:
            automaton.append(token)
        text += run
        assert automaton.match_len == longest_match(text)
        for first in range(len(text)):
            state = 0
            for end in range(first + 1, min(first + max_counted, len(text)) + 1):
                state = automaton.next[state][text[end - 1]]
                pattern = text[first:end]
                assert automaton.num_occurrences[state] == len(ends_of(text, pattern))
                if len(pattern) < max_counted:
                    found = [text[e] for e in ends_of(text, pattern) if e < len(text)]
                    counts = {token: automaton.num_occurrences[s] for token, s in automaton.next[state].items()}
                    assert counts == {token: found.count(token) for token in found}
                    assert automaton.best[state] == (most_frequent(found) if found else -1)
        state, n = automaton.match()
        assert n == followers(text, text, max_counted - 1)[0]
