"""References of events on PostgreSQL: checked once a statement in place of twice a row."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
# The version before meets the same tables, and the same errors.
compatible_from = "0006"
branch_labels = None
depends_on = None

REFERENCES = (("user_id", "users"), ("item_id", "items"))
# A plan stays for the session: made for a few rows, it would read a whole table for each of many.
SETTINGS = "LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off"
ERROR = "USING ERRCODE = 'foreign_key_violation', TABLE = 'events', CONSTRAINT = 'fk_events_{}'"
# Each row is locked as a foreign key does it: nobody deletes it before the events are committed.
EXISTS = """
  IF EXISTS (
    SELECT FROM (SELECT DISTINCT {column} FROM changed) AS event LEFT JOIN LATERAL
      (SELECT id FROM {table} WHERE id = event.{column} FOR KEY SHARE) AS found ON true
      WHERE found.id IS NULL
  ) THEN
    RAISE 'events refer to {table} that do not exist' {error};
  END IF;"""
EVENTS_FUNCTION = "CREATE FUNCTION check_references_of_events() RETURNS trigger {} AS $$BEGIN{}\n"
UNUSED_FUNCTION = """
CREATE FUNCTION check_no_event_of_{table}() RETURNS trigger {settings} AS $$ BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    IF NOT EXISTS (SELECT FROM events) THEN RETURN NULL; END IF;
  ELSIF TG_OP = 'UPDATE' AND NEW.id = OLD.id
      OR NOT EXISTS (SELECT FROM events WHERE {column} = OLD.id) THEN
    RETURN NULL;
  END IF;
  RAISE 'events refer to {table}' {error};
END $$"""


def upgrade() -> None:
    """Apply this revision."""
    if op.get_context().dialect.name == "sqlite":
        return
    checks = ""
    for column, table in REFERENCES:
        error = ERROR.format(column)
        checks += EXISTS.format(column=column, table=table, error=error)
        op.drop_constraint(f"fk_events_{column}", "events", type_="foreignkey")
        op.execute(
            UNUSED_FUNCTION.format(column=column, table=table, error=error, settings=SETTINGS)
        )
        for name, when, each in (
            ("unused", "DELETE OR UPDATE OF id", "ROW"),
            ("truncated", "TRUNCATE", "STATEMENT"),
        ):
            op.execute(
                f"CREATE TRIGGER {name} AFTER {when} ON {table} FOR EACH {each} "
                f"EXECUTE FUNCTION check_no_event_of_{table}()"
            )
    op.execute(EVENTS_FUNCTION.format(SETTINGS, checks) + "  RETURN NULL;\nEND $$")
    for what in ("INSERT", "UPDATE"):
        op.execute(
            f"CREATE TRIGGER references_{what.lower()} AFTER {what} ON events "
            "REFERENCING NEW TABLE AS changed FOR EACH STATEMENT "
            "EXECUTE FUNCTION check_references_of_events()"
        )


def downgrade() -> None:
    """Revert this revision. Interrupted, it can be repeated."""
    if op.get_context().dialect.name == "sqlite":
        return
    with op.get_context().autocommit_block():
        for column, table in REFERENCES:
            name = f"fk_events_{column}"
            op.execute(f"ALTER TABLE events DROP CONSTRAINT IF EXISTS {name}")
            op.execute(
                f"ALTER TABLE events ADD CONSTRAINT {name} "
                f"FOREIGN KEY ({column}) REFERENCES {table} (id) NOT VALID"
            )
            # Events are written meanwhile.
            op.execute(f"ALTER TABLE events VALIDATE CONSTRAINT {name}")
    op.execute("DROP FUNCTION check_references_of_events() CASCADE")
    for _, table in REFERENCES:
        op.execute(f"DROP FUNCTION check_no_event_of_{table}() CASCADE")
