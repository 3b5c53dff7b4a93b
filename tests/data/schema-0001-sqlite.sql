-- A database at revision 0001, with data in every table; see tests/app/core/test_upgrade.py.
PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO alembic_version VALUES('0001');
CREATE TABLE counters (
	name TEXT NOT NULL, 
	value BIGINT NOT NULL, 
	CONSTRAINT pk_counters PRIMARY KEY (name)
);
INSERT INTO counters VALUES('event_seq',9);
INSERT INTO counters VALUES('catalog_seq',4);
CREATE TABLE users (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	external_id TEXT NOT NULL, 
	last_seq BIGINT DEFAULT '0' NOT NULL, 
	created_at BIGINT NOT NULL, 
	CONSTRAINT uq_users_external_id UNIQUE (external_id)
);
INSERT INTO users VALUES(1,'ann',9,1767225600000000);
INSERT INTO users VALUES(2,'bob',7,1767225600000001);
INSERT INTO users VALUES(4,'zoë/ü 名前',8,1767225600000003);
CREATE TABLE items (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	external_id TEXT NOT NULL, 
	title TEXT, 
	categories JSON DEFAULT '[]' NOT NULL, 
	hidden BOOLEAN DEFAULT 0 NOT NULL, 
	attributes JSON DEFAULT '{}' NOT NULL, 
	described BOOLEAN DEFAULT 0 NOT NULL, 
	deleted BOOLEAN DEFAULT 0 NOT NULL, 
	seq BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	CONSTRAINT uq_items_external_id UNIQUE (external_id)
);
INSERT INTO items VALUES(1,'a','First ''quoted'' title','["Comedy", "Drama"]',0,'{"year": 1999, "tag": "x\\y"}',1,0,1,1767225600000000,1767225600000000);
INSERT INTO items VALUES(2,'b','Second','[]',1,'{}',1,0,2,1767225600000000,1767225600000050);
INSERT INTO items VALUES(3,'c',NULL,'[]',0,'{}',0,0,3,1767225600000000,1767225600000000);
INSERT INTO items VALUES(4,'d',NULL,'[]',0,'{}',0,1,4,1767225600000000,1767225600000070);
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	event_id TEXT NOT NULL, 
	user_id BIGINT NOT NULL, 
	item_id BIGINT NOT NULL, 
	type TEXT NOT NULL, 
	value DOUBLE, 
	timestamp BIGINT NOT NULL, 
	recommendation_id TEXT, 
	created_at BIGINT NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (seq), 
	CONSTRAINT uq_events_event_id UNIQUE (event_id), 
	CONSTRAINT fk_events_user_id FOREIGN KEY(user_id) REFERENCES users (id), 
	CONSTRAINT fk_events_item_id FOREIGN KEY(item_id) REFERENCES items (id)
);
INSERT INTO events VALUES(1,'e1',1,1,'interaction',NULL,1767225600000000,NULL,1767225600000010);
INSERT INTO events VALUES(2,'e2',1,2,'click',4.5,1767225601000000,'rec-1',1767225600000020);
INSERT INTO events VALUES(3,'e3',2,1,'interaction',1.0000000000000000047e+300,1767225600000000,NULL,1767225600000030);
INSERT INTO events VALUES(5,'e5 ''x'' é',2,3,'purchase',0.10000000000000000555,1767225602000000,NULL,1767225600000040);
INSERT INTO events VALUES(6,'e6',4,4,'interaction',NULL,0,NULL,1767225600000050);
INSERT INTO events VALUES(7,'e7',2,2,'interaction',-2.5,1767225603000000,NULL,1767225600000060);
INSERT INTO events VALUES(8,'e8',4,3,'click',NULL,1767225604000000,NULL,1767225600000070);
INSERT INTO events VALUES(9,'e9',1,3,'interaction',0.0,1767225605000000,NULL,1767225600000080);
CREATE TABLE models (
	version TEXT NOT NULL, 
	status TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	factors INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	checksum TEXT NOT NULL, 
	trained_seq BIGINT NOT NULL, 
	users BIGINT NOT NULL, 
	items BIGINT NOT NULL, 
	interactions BIGINT NOT NULL, 
	metrics JSON DEFAULT '{}' NOT NULL, 
	params JSON DEFAULT '{}' NOT NULL, 
	job_id TEXT, 
	created_at BIGINT NOT NULL, 
	activated_at BIGINT, 
	CONSTRAINT pk_models PRIMARY KEY (version), 
	CONSTRAINT ck_models_status CHECK (status IN ('published', 'rejected', 'deleted'))
);
INSERT INTO models VALUES('20260101-000000-abcdef','published','neupr',8,'models/20260101-000000-abcdef','0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f',8,3,4,7,'{"sampled": {"ndcg@10": 0.25, "hr@10": 0.5}}','{"epochs": 5}','job-1',1767225600000090,NULL);
CREATE TABLE activation (
	id INTEGER NOT NULL, 
	version TEXT, 
	previous TEXT, 
	activated_at BIGINT, 
	generation BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_activation PRIMARY KEY (id), 
	CONSTRAINT ck_activation_single CHECK (id = 1)
);
INSERT INTO activation VALUES(1,NULL,NULL,NULL,0);
CREATE TABLE jobs (
	job_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	status TEXT NOT NULL, 
	params JSON DEFAULT '{}' NOT NULL, 
	progress JSON, 
	attempt INTEGER DEFAULT '0' NOT NULL, 
	owner TEXT, 
	lease_until BIGINT, 
	cancel_requested BOOLEAN DEFAULT 0 NOT NULL, 
	created_at BIGINT NOT NULL, 
	started_at BIGINT, 
	finished_at BIGINT, 
	model_version TEXT, 
	metrics JSON, 
	error TEXT, 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT ck_jobs_status CHECK (status IN ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'rejected'))
);
INSERT INTO jobs VALUES('job-1','train','succeeded','{"model": "neupr", "factors": 8, "epochs": 5}',NULL,1,NULL,NULL,0,1767225600000080,1767225600000085,1767225600000095,'20260101-000000-abcdef','{"sampled": {"ndcg@10": 0.25}}',NULL);
INSERT INTO jobs VALUES('job-2','train','failed','{}',NULL,3,NULL,NULL,0,1767225600000100,1767225600000105,1767225600000110,NULL,NULL,'the worker stopped three times');
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence VALUES('users',4);
INSERT INTO sqlite_sequence VALUES('items',4);
CREATE INDEX ix_items_seq ON items (seq);
CREATE INDEX ix_events_user_id_seq ON events (user_id, seq, item_id);
CREATE INDEX ix_events_item_id_user_id ON events (item_id, user_id);
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
CREATE UNIQUE INDEX uq_jobs_running_train ON jobs (kind) WHERE status = 'running' AND kind = 'train';
COMMIT;
