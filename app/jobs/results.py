"""What a job has brought about, written in one commit with its end."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.logging import get_logger
from app.core.metadata import now_us
from app.jobs.outcomes import Cancelled, LostJob
from app.jobs.repository import Claim, JobRepository
from app.models.schemas import Activation, ModelRow
from app.models.service import ModelRegistry

log = get_logger(__name__)


class Results:
    """Writes what the child processes of a worker have made. Raises LostJob, and writes nothing,
    where the job is another worker's by then, and Cancelled where somebody has asked for its end.

    With ``precompute`` candidates are computed for a model that is served.
    """

    def __init__(self, database: Database, models: ModelRegistry, *, precompute: bool) -> None:
        self._database = database
        self._models = models
        self._jobs = JobRepository(database)
        self._precompute = precompute

    async def candidates(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """Of a job for candidates: they are there."""
        async with self._database.write() as conn:
            await self._finish(conn, claim, "succeeded", version, summary)
        log.info("candidates computed", job_id=claim.job_id, version=version, **summary)

    async def model(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """The model, its activation and the job's end are one commit: all of it or nothing.

        One that the gate has rejected is kept, and not served; nor is one that was compared with
        another version than the one that it would take the place of, unless by force.
        """
        gate = summary["metrics"]["gate"]
        rejected = gate["decision"] == "rejected"
        status = "rejected" if rejected else "succeeded"
        async with self._database.write() as conn:
            # From here on what is served stays what it is.
            why = _why_not(await self._models.lock(conn), gate)
            gate = gate | {"served": why is None} | ({} if why is None else {"why": why})
            metrics = summary["metrics"] | {"gate": gate}
            row = self._row(claim, version, summary | {"metrics": metrics})
            await self._finish(conn, claim, status, version, metrics)
            detail = {"job_id": claim.job_id} | ({"forced": True} if gate["forced"] else {})
            served = await self._models.publish(conn, row, detail, serve=why is None)
            if served and self._precompute:
                await self._jobs.insert("candidates", {"version": version}, conn)
        if served:
            self._models.announce()
        log.info(
            "model rejected" if rejected else "model published",
            job_id=claim.job_id,
            version=version,
            served=served,
            finding=gate["finding"],
            **({} if served or rejected else {"why": why}),
        )

    def _row(self, claim: Claim, version: str, summary: dict[str, Any]) -> ModelRow:
        rejected = summary["metrics"]["gate"]["decision"] == "rejected"
        return ModelRow(
            version=version,
            status="rejected" if rejected else "published",
            kind=claim.params["model"],
            factors=claim.params["factors"],
            path=self._models.path_of(version),
            checksum=summary["checksum"],
            trained_seq=summary["trained_seq"],
            users=summary["users"],
            items=summary["items"],
            interactions=summary["interactions"],
            metrics=summary["metrics"],
            params=claim.params,
            job_id=claim.job_id,
            created_at=now_us(),
            activated_at=None,
        )

    async def _finish(
        self,
        conn: AsyncConnection,
        claim: Claim,
        status: str,
        version: str,
        metrics: dict[str, Any],
    ) -> None:
        if await self._jobs.finish(conn, claim, status, model_version=version, metrics=metrics):
            return
        raise Cancelled if await self._jobs.is_cancelled(conn, claim) else LostJob


def _why_not(now: Activation, gate: dict[str, Any]) -> str | None:
    """Why a new model is not served; None if it is."""
    if gate["decision"] == "rejected":
        return "rejected by the gate"
    if now.pinned:
        return "the version that is served is pinned"
    if now.version != gate["incumbent"] and not gate["forced"]:
        # It might be worse than this one, which somebody chose meanwhile.
        return f"another version was activated meanwhile: {now.version}"
    return None
