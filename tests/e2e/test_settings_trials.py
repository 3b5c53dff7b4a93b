"""A settings trial over two servers: they agree on who is in it, and count together."""

from __future__ import annotations

import httpx2
import pytest

from benchmarks.faults.setup import LEASE, SMALL, TRAINING, add_events, storage, wait_for
from tests.cluster.process import wait_until
from tests.cluster.servers import NcrServer, NcrWorker
from tests.cluster.topology import missing_programs
from tests.conftest import skip_or_fail
from tests.e2e.support import ncr

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.postgres)
USERS = list(dict.fromkeys(user for user, _, _ in SMALL.interactions))


@pytest.mark.parametrize("database", ["sqlite", POSTGRESQL])
def test_two_servers_agree_on_the_arms_and_count_together(database: str) -> None:
    if database == "postgresql" and (missing := missing_programs()):
        skip_or_fail(f"not found on this machine: {', '.join(missing)}")
    with storage(database) as place:
        env = place.env(**LEASE)
        with (
            NcrServer(env, place.folder / "server-1.log") as one,
            NcrServer(env, place.folder / "server-2.log") as two,
            httpx2.Client(base_url=one.url, timeout=30) as first,
            httpx2.Client(base_url=two.url, timeout=30) as second,
        ):
            clients = (first, second)
            add_events(one.url)
            job_id = first.post("/admin/train", json=TRAINING).json()["job_id"]
            with NcrWorker(env, place.folder / "worker.log"):
                wait_for(first, job_id, lambda job: job["status"] == "succeeded")
            wait_until(
                lambda: all(
                    client.get(f"/recommend/{USERS[0]}").json()["model_version"]
                    for client in clients
                ),
                30,
                "model on both servers",
            )
            plain = {user: first.get(f"/recommend/{user}").json() for user in USERS}
            varied = {
                user: first.get(f"/recommend/{user}", params={"diversity": 0.7}).json()
                for user in USERS
            }
            begun = ncr(
                *("trials", "start", "--kind", "settings", "--share", "0.4"),
                *("--set", "diversity=0.7"),
                **env,
            )
            assert begun.returncode == 0, begun.stderr
            trial_id = begun.stderr.strip().removeprefix("started: ")

            def arm_of(client: httpx2.Client, user: str) -> str:
                source = client.get(f"/recommend/{user}").json()["recommendation_id"].split(".")[0]
                return source.removeprefix(f"{trial_id}-")

            wait_until(
                lambda: all(arm_of(client, USERS[0]) in ("a", "b") for client in clients),
                10,
                "trial on both servers",
            )
            arms = {user: arm_of(first, user) for user in USERS}
            assert arms == {user: arm_of(second, user) for user in USERS}
            assert 10 < sum(arm == "b" for arm in arms.values()) < 40
            clicked: dict[str, int] = {"a": 0, "b": 0}
            for n, user in enumerate(USERS):
                answer = clients[n % 2].get(f"/recommend/{user}").json()
                expected = plain if arms[user] == "a" else varied
                assert answer["items"] == expected[user]["items"]
                if arms[user] == "b" or n % 5 == 0:
                    event = {"user": user, "item": answer["items"][0]["id"], "type": "click"}
                    event["recommendation_id"] = answer["recommendation_id"]
                    told = clients[n % 2].post("/events", json=event).json()
                    assert told["accepted"] == 1
                    clicked[arms[user]] += 1

            lists = {arm: 3 * sum(each == arm for each in arms.values()) for arm in "ab"}

            def written() -> bool:
                report = first.get(f"/admin/trials/{trial_id}").json()["report"]
                # The first user was asked for until the trial was there.
                return all(report[arm]["lists"] >= lists[arm] for arm in "ab")

            wait_until(written, 15, "counts of both servers")
            stopped = second.post(f"/admin/trials/{trial_id}/stop").json()
            report = stopped["report"]
            assert report["users"] == len(USERS)
            assert {arm: report[arm]["clicked"] for arm in "ab"} == clicked
            assert report["b"]["rate"] > report["a"]["rate"]
            listed = ncr("trials", "list", **env)
            assert "diversity=0.7" in "".join(listed.stdout.split())
            for name in ("explore=1", "diversity=2", "diversity"):
                bad = ncr("trials", "start", "--kind", "settings", "--set", name, **env)
                assert bad.returncode != 0
                assert "Traceback" not in bad.stderr
