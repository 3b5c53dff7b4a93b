"""Records the result of a job: what it made and the job's end, in one transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from app.core.database import Database
from app.core.logging import get_logger
from app.core.tables import now_us
from app.jobs.repository import Claim, JobRepository
from app.registry.schemas import Activation, ModelRow
from app.registry.service import ModelRegistry
from app.worker.child_process import Cancelled, LostJob

log = get_logger(__name__)


class Publisher:
    """Publishes what child processes have made.

    Every method raises LostJob, and writes nothing, where another worker owns the job by then, and
    Cancelled where a client has cancelled it.
    """

    def __init__(self, database: Database, models: ModelRegistry, *, precompute: bool) -> None:
        """With ``precompute`` a model that is served gets a job that computes candidates."""
        self._database = database
        self._models = models
        self._jobs = JobRepository(database)
        self._precompute = precompute

    async def candidates(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """Ends a job that has computed candidates."""
        async with self._database.write() as conn:
            await self._finish(conn, claim, "succeeded", version, summary)
        log.info("candidates computed", job_id=claim.job_id, version=version, **summary)

    async def model(self, claim: Claim, version: str, summary: dict[str, Any]) -> None:
        """Adds a trained model to the registry, activates it, and ends its job: all or nothing.

        A model that the gate rejected is kept but not served; nor is one that was compared with
        another version than the one it would replace, unless by force.
        """
        gate = summary["metrics"]["gate"]
        rejected = gate["decision"] == "rejected"
        async with self._database.write() as conn:
            # From here on the active version stays what it is.
            reason = _reason_not_to_serve(await self._models.lock(conn), gate)
            gate = gate | {"served": reason is None} | ({} if reason is None else {"why": reason})
            metrics = summary["metrics"] | {"gate": gate}
            await self._finish(
                conn, claim, "rejected" if rejected else "succeeded", version, metrics
            )
            params = claim.params | summary["architecture"]
            row = ModelRow(
                version=version,
                status="rejected" if rejected else "published",
                kind=params["model"],
                factors=params["factors"],
                path=self._models.stored_path(version),
                checksum=summary["checksum"],
                trained_seq=summary["trained_seq"],
                users=summary["users"],
                items=summary["items"],
                interactions=summary["interactions"],
                metrics=metrics,
                params=params,
                job_id=claim.job_id,
                created_at=now_us(),
                activated_at=None,
            )
            detail = {"job_id": claim.job_id} | ({"forced": True} if gate["forced"] else {})
            served = await self._models.publish(conn, row, detail, serve=reason is None)
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
            **({} if served or rejected else {"why": reason}),
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


def _reason_not_to_serve(activation: Activation, gate: dict[str, Any]) -> str | None:
    """Why a new model is not served; None if it is."""
    if gate["decision"] == "rejected":
        return "rejected by the gate"
    if activation.pinned:
        return "the version that is served is pinned"
    if activation.version != gate["incumbent"] and not gate["forced"]:
        # It might be worse than this one, which somebody chose meanwhile.
        return f"another version was activated meanwhile: {activation.version}"
    return None
