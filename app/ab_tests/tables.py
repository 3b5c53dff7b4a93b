"""Tables of served lists and of trials."""

from __future__ import annotations

import sqlalchemy as sa

from app.core.tables import Json, metadata

# Lists that a version served in an hour, counted in memory and added here now and then: the
# denominator of click-through.
served_lists = sa.Table(
    "served",
    metadata,
    sa.Column("version", sa.Text, primary_key=True),
    # Hours since 1970, UTC.
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("lists", sa.BigInteger, nullable=False),
)

_RUNNING = sa.text("status = 'running'")

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("trial_id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    # The active version, and the one that is tested against it.
    sa.Column("version_a", sa.Text, nullable=False),
    sa.Column("version_b", sa.Text, nullable=False),
    # The share of requests (shadow) or users (interleaving) that take part.
    sa.Column("share", sa.Double, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("ended_at", sa.BigInteger, nullable=True),
    # Set when the trial ends.
    sa.Column("report", Json, nullable=True),
    # Lists with a click after which the difference is read; NULL where none was decided.
    sa.Column("planned_clicked", sa.BigInteger, nullable=True),
    sa.CheckConstraint("kind IN ('interleaving', 'shadow')", name="kind"),
    sa.CheckConstraint("status IN ('running', 'ended')", name="status"),
    sa.CheckConstraint("version_a <> version_b", name="two_versions"),
    # At most one of a kind runs, whichever server begins it.
    sa.Index(
        "uq_trials_running",
        "kind",
        unique=True,
        sqlite_where=_RUNNING,
        postgresql_where=_RUNNING,
    ),
)

# A trial that gives a share of the users other settings. A table of its own: the version before
# reads `trials`, and knows no such kind.
settings_trials = sa.Table(
    "settings_trials",
    metadata,
    sa.Column("trial_id", sa.Text, primary_key=True),
    # The active version, and the one that ranks for the share; they may be the same.
    sa.Column("version_a", sa.Text, nullable=False),
    sa.Column("version_b", sa.Text, nullable=False),
    # The settings of the share by name.
    sa.Column("settings", Json, nullable=False),
    # The share of the users who get them.
    sa.Column("share", sa.Double, nullable=False),
    # The lists of both arms for which the test is tuned.
    sa.Column("planned_lists", sa.BigInteger, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("ended_at", sa.BigInteger, nullable=True),
    # Set when the trial ends.
    sa.Column("report", Json, nullable=True),
    sa.CheckConstraint("status IN ('running', 'ended')", name="status"),
    # At most one runs, whichever server begins it.
    sa.Index(
        "uq_settings_trials_running",
        "status",
        unique=True,
        sqlite_where=_RUNNING,
        postgresql_where=_RUNNING,
    ),
)

# The lists that a user of such a trial got. A number stands for the user: see `user_number`.
trial_lists = sa.Table(
    "trial_lists",
    metadata,
    sa.Column("trial_id", sa.Text, sa.ForeignKey("settings_trials.trial_id"), primary_key=True),
    sa.Column("arm", sa.Text, primary_key=True),
    sa.Column("user_number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("lists", sa.BigInteger, nullable=False),
)

# Sums of a trial by name, which every server adds to.
trial_sums = sa.Table(
    "trial_sums",
    metadata,
    sa.Column("trial_id", sa.Text, sa.ForeignKey("trials.trial_id"), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Double, nullable=False),
)

# An interleaved list: which version contributed which item.
impressions = sa.Table(
    "impressions",
    metadata,
    sa.Column("recommendation_id", sa.Text, primary_key=True),
    sa.Column("trial_id", sa.Text, sa.ForeignKey("trials.trial_id"), nullable=False),
    # Null for a user without events, who has no row.
    sa.Column("user_id", sa.BigInteger, sa.ForeignKey("users.id"), nullable=True),
    # {"a": [internal item ids], "b": […]}: the items that each version gets credit for.
    sa.Column("teams", Json, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Index("ix_impressions_trial_id", "trial_id"),
    sa.Index("ix_impressions_user_id", "user_id"),
)
