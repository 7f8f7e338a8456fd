"""Topics that are deleted and created again, with crashes in between: nothing of the old one may come back in the new one."""

from __future__ import annotations

from .checker import Violation
from .store_world import TOPICS, StoreWorld, last_scan


def check_topics(seed: int) -> list[Violation]:
    """Sends, deletions, creations and restarts; each topic has what was sent since it was made, and nothing else."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    rng = world.rng
    expected: dict[str, list[str]] = {}
    offsets: dict[str, int] = {}
    for _ in range(40):
        topic = rng.choice(TOPICS)
        action = rng.choice(
            (
                "create",
                "send",
                "send",
                "send",
                "delete",
                "checkpoint",
                "housekeeping",
                "commit",
                "crash",
            )
        )
        assert world.store is not None
        if action == "create" and topic not in expected:
            world.store.topics.create(world.topic_config(topic))
            world.flush()
            expected[topic] = []
        elif action == "send" and topic in expected:
            order = world.new_order(count=rng.choice((1, 1, 3, 12)), size=40, topic=topic)
            order.queue = 0
            world.send([order])
            world.flush()
            expected[topic] += order.ids
        elif action == "delete" and topic in expected:
            world.store.delete_topic(topic)
            world.flush()
            del expected[topic]
            offsets.pop(topic, None)
            world.commits.pop((topic, 0), None)
        elif action == "commit" and topic in expected:
            offsets[topic] = rng.randrange(1, 9)
            world.commit_offset(topic, 0, offsets[topic])
            world.flush()
        elif action == "checkpoint":
            world.checkpoint()
        elif action == "housekeeping":
            world.housekeeping()
        elif action == "crash":
            world = world.fork(rng.choice(("kill", "power")), rng)
            world.open()
        found = _compare(world, expected, offsets)
        if found:
            return [
                Violation(item.invariant, f"after {action} {topic}: {item.message}")
                for item in found
            ]
    return []


def _compare(
    world: StoreWorld, expected: dict[str, list[str]], offsets: dict[str, int]
) -> list[Violation]:
    assert world.store is not None
    world.scan()
    found = []
    for topic in TOPICS:
        is_there = world.store.topics.find(topic) is not None
        if is_there != (topic in expected):
            found.append(Violation("C3", f"topic {topic} {'is there' if is_there else 'is gone'}"))
        queues = last_scan(world.history.events)["queues"]
        ids = [
            record[1] for queue in queues if queue["topic"] == topic for record in queue["records"]
        ]
        if topic in expected and ids != expected[topic]:
            found.append(
                Violation(
                    "A6",
                    f"{topic} has {ids[:5]} … ({len(ids)}), not {expected[topic][:5]} … ({len(expected[topic])})",
                )
            )
        committed = world.committed(topic, 0)
        if topic in expected and committed != offsets.get(topic):
            found.append(
                Violation(
                    "C3",
                    f"the committed offset of {topic} is {committed}, not {offsets.get(topic)}",
                )
            )
    return found
