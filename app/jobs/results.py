"""What a job has brought about, written in one commit with its end."""

from __future__ import annotations

from typing import Any

from app.core.database import Database
from app.core.logging import get_logger
from app.core.metadata import now_us
from app.jobs.outcomes import LostJob
from app.jobs.repository import Claim, JobRepository
from app.models.schemas import ModelRow
from app.models.service import ModelRegistry

log = get_logger(__name__)


class Results:
    """Writes what the child processes of a worker have made. Raises LostJob, and writes nothing,
    where the job is another worker's by then.

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
            held = await self._jobs.finish(
                conn, claim, "succeeded", model_version=version, metrics=summary
            )
        if not held:
            raise LostJob
        log.info("candidates computed", job_id=claim.job_id, version=version, **summary)

    async def model(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """The model, its activation and the job's end are one commit: all of it or nothing.

        One that the gate has rejected is kept, and not served.
        """
        gate = summary["metrics"]["gate"]
        rejected = gate["decision"] == "rejected"
        row = ModelRow(
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
        async with self._database.write() as conn:
            held = await self._jobs.finish(
                conn,
                claim,
                "rejected" if rejected else "succeeded",
                model_version=version,
                metrics=summary["metrics"],
            )
            if not held:
                raise LostJob
            detail = {"job_id": claim.job_id} | ({"forced": True} if gate["forced"] else {})
            served = await self._models.publish(conn, row, detail)
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
        )
