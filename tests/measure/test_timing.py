import time

from snapkv.measure.timing import alternate, ratios, spent_on, spread


def test_contenders_take_turns_and_each_round_starts_with_another():
    order = []

    def contender(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    times = alternate({name: contender(name) for name in "abc"}, rounds=2, warmup_rounds=1)
    assert "".join(order) == "abcbcacab"
    assert times == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}


def test_percentiles_and_ratios_of_pairs():
    assert spread([5, 1, 4, 2, 3], 1) == {"p20": 1.8, "p50": 3, "p80": 4.2}
    assert ratios([2, 9], [1, 3]) == [2, 3]


def test_waiting_takes_time_on_the_clock_and_none_of_the_processor():
    spent = spent_on(lambda: time.sleep(0.05))
    assert spent.wall_ms >= 49
    assert spent.cpu_ms < 25
