-- A database at revision 0001, with data in every table; see tests/app/core/test_upgrade.py.

CREATE TABLE public.activation (
    id integer NOT NULL,
    version text,
    previous text,
    activated_at bigint,
    generation bigint DEFAULT '0'::bigint NOT NULL,
    CONSTRAINT ck_activation_single CHECK ((id = 1))
);

CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);

CREATE TABLE public.counters (
    name text NOT NULL,
    value bigint NOT NULL
);

CREATE TABLE public.events (
    seq bigint NOT NULL,
    event_id text NOT NULL,
    user_id bigint NOT NULL,
    item_id bigint NOT NULL,
    type text NOT NULL,
    value double precision,
    "timestamp" bigint NOT NULL,
    recommendation_id text,
    created_at bigint NOT NULL
);

CREATE TABLE public.items (
    id bigint NOT NULL,
    external_id text NOT NULL,
    title text,
    categories jsonb DEFAULT '[]'::jsonb NOT NULL,
    hidden boolean DEFAULT false NOT NULL,
    attributes jsonb DEFAULT '{}'::jsonb NOT NULL,
    described boolean DEFAULT false NOT NULL,
    deleted boolean DEFAULT false NOT NULL,
    seq bigint NOT NULL,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL
);

CREATE SEQUENCE public.items_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.items_id_seq OWNED BY public.items.id;

CREATE TABLE public.jobs (
    job_id text NOT NULL,
    kind text NOT NULL,
    status text NOT NULL,
    params jsonb DEFAULT '{}'::jsonb NOT NULL,
    progress jsonb,
    attempt integer DEFAULT 0 NOT NULL,
    owner text,
    lease_until bigint,
    cancel_requested boolean DEFAULT false NOT NULL,
    created_at bigint NOT NULL,
    started_at bigint,
    finished_at bigint,
    model_version text,
    metrics jsonb,
    error text,
    CONSTRAINT ck_jobs_status CHECK ((status = ANY (ARRAY['queued'::text, 'running'::text, 'succeeded'::text, 'failed'::text, 'cancelled'::text, 'rejected'::text])))
);

CREATE TABLE public.models (
    version text NOT NULL,
    status text NOT NULL,
    kind text NOT NULL,
    factors integer NOT NULL,
    path text NOT NULL,
    checksum text NOT NULL,
    trained_seq bigint NOT NULL,
    users bigint NOT NULL,
    items bigint NOT NULL,
    interactions bigint NOT NULL,
    metrics jsonb DEFAULT '{}'::jsonb NOT NULL,
    params jsonb DEFAULT '{}'::jsonb NOT NULL,
    job_id text,
    created_at bigint NOT NULL,
    activated_at bigint,
    CONSTRAINT ck_models_status CHECK ((status = ANY (ARRAY['published'::text, 'rejected'::text, 'deleted'::text])))
);

CREATE TABLE public.users (
    id bigint NOT NULL,
    external_id text NOT NULL,
    last_seq bigint DEFAULT '0'::bigint NOT NULL,
    created_at bigint NOT NULL
);

CREATE SEQUENCE public.users_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.users_id_seq OWNED BY public.users.id;

ALTER TABLE ONLY public.items ALTER COLUMN id SET DEFAULT nextval('public.items_id_seq'::regclass);

ALTER TABLE ONLY public.users ALTER COLUMN id SET DEFAULT nextval('public.users_id_seq'::regclass);

INSERT INTO public.activation VALUES (1, NULL, NULL, NULL, 0);

INSERT INTO public.alembic_version VALUES ('0001');

INSERT INTO public.counters VALUES ('event_seq', 9);
INSERT INTO public.counters VALUES ('catalog_seq', 4);

INSERT INTO public.events VALUES (1, 'e1', 1, 1, 'interaction', NULL, 1767225600000000, NULL, 1767225600000010);
INSERT INTO public.events VALUES (2, 'e2', 1, 2, 'click', 4.5, 1767225601000000, 'rec-1', 1767225600000020);
INSERT INTO public.events VALUES (3, 'e3', 2, 1, 'interaction', 1e+300, 1767225600000000, NULL, 1767225600000030);
INSERT INTO public.events VALUES (5, 'e5 ''x'' é', 2, 3, 'purchase', 0.1, 1767225602000000, NULL, 1767225600000040);
INSERT INTO public.events VALUES (6, 'e6', 4, 4, 'interaction', NULL, 0, NULL, 1767225600000050);
INSERT INTO public.events VALUES (7, 'e7', 2, 2, 'interaction', -2.5, 1767225603000000, NULL, 1767225600000060);
INSERT INTO public.events VALUES (8, 'e8', 4, 3, 'click', NULL, 1767225604000000, NULL, 1767225600000070);
INSERT INTO public.events VALUES (9, 'e9', 1, 3, 'interaction', 0, 1767225605000000, NULL, 1767225600000080);

INSERT INTO public.items VALUES (1, 'a', 'First ''quoted'' title', '["Comedy", "Drama"]', false, '{"tag": "x\\y", "year": 1999}', true, false, 1, 1767225600000000, 1767225600000000);
INSERT INTO public.items VALUES (2, 'b', 'Second', '[]', true, '{}', true, false, 2, 1767225600000000, 1767225600000050);
INSERT INTO public.items VALUES (3, 'c', NULL, '[]', false, '{}', false, false, 3, 1767225600000000, 1767225600000000);
INSERT INTO public.items VALUES (4, 'd', NULL, '[]', false, '{}', false, true, 4, 1767225600000000, 1767225600000070);

INSERT INTO public.jobs VALUES ('job-1', 'train', 'succeeded', '{"model": "neupr", "epochs": 5, "factors": 8}', NULL, 1, NULL, NULL, false, 1767225600000080, 1767225600000085, 1767225600000095, '20260101-000000-abcdef', '{"sampled": {"ndcg@10": 0.25}}', NULL);
INSERT INTO public.jobs VALUES ('job-2', 'train', 'failed', '{}', NULL, 3, NULL, NULL, false, 1767225600000100, 1767225600000105, 1767225600000110, NULL, NULL, 'the worker stopped three times');

INSERT INTO public.models VALUES ('20260101-000000-abcdef', 'published', 'neupr', 8, 'models/20260101-000000-abcdef', '0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f', 8, 3, 4, 7, '{"sampled": {"hr@10": 0.5, "ndcg@10": 0.25}}', '{"epochs": 5}', 'job-1', 1767225600000090, NULL);

INSERT INTO public.users VALUES (1, 'ann', 9, 1767225600000000);
INSERT INTO public.users VALUES (2, 'bob', 7, 1767225600000001);
INSERT INTO public.users VALUES (4, 'zoë/ü 名前', 8, 1767225600000003);

SELECT pg_catalog.setval('public.items_id_seq', 4, true);

SELECT pg_catalog.setval('public.users_id_seq', 4, true);

ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);

ALTER TABLE ONLY public.activation
    ADD CONSTRAINT pk_activation PRIMARY KEY (id);

ALTER TABLE ONLY public.counters
    ADD CONSTRAINT pk_counters PRIMARY KEY (name);

ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (seq);

ALTER TABLE ONLY public.items
    ADD CONSTRAINT pk_items PRIMARY KEY (id);

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (job_id);

ALTER TABLE ONLY public.models
    ADD CONSTRAINT pk_models PRIMARY KEY (version);

ALTER TABLE ONLY public.users
    ADD CONSTRAINT pk_users PRIMARY KEY (id);

ALTER TABLE ONLY public.events
    ADD CONSTRAINT uq_events_event_id UNIQUE (event_id);

ALTER TABLE ONLY public.items
    ADD CONSTRAINT uq_items_external_id UNIQUE (external_id);

ALTER TABLE ONLY public.users
    ADD CONSTRAINT uq_users_external_id UNIQUE (external_id);

CREATE INDEX ix_events_item_id_user_id ON public.events USING btree (item_id, user_id);

CREATE INDEX ix_events_user_id_seq ON public.events USING btree (user_id, seq, item_id);

CREATE INDEX ix_items_seq ON public.items USING btree (seq);

CREATE INDEX ix_jobs_created_at_job_id ON public.jobs USING btree (created_at, job_id);

CREATE UNIQUE INDEX uq_jobs_running_train ON public.jobs USING btree (kind) WHERE ((status = 'running'::text) AND (kind = 'train'::text));

ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_item_id FOREIGN KEY (item_id) REFERENCES public.items(id);

ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_user_id FOREIGN KEY (user_id) REFERENCES public.users(id);
