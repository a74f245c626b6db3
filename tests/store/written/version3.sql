BEGIN TRANSACTION;
CREATE TABLE facts (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        type TEXT NOT NULL,
        job_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "facts" VALUES(1,1.0,'WorkerJoined',NULL,'{"worker_id":"w","offer":{"kinds":["chat"],"models":["m"],"slots":1,"features":[],"context":0,"only_for":[],"remark":""},"cancels":true}');
INSERT INTO "facts" VALUES(2,10.0,'JobSubmitted','done','{"job_id":"done"}');
INSERT INTO "facts" VALUES(3,10.0,'JobLeased','done','{"job_id":"done","worker_id":"w","lease":1,"reason":"best","passed_over":[]}');
INSERT INTO "facts" VALUES(4,11.0,'JobSubmitted','failed','{"job_id":"failed"}');
INSERT INTO "facts" VALUES(5,11.0,'JobLeased','failed','{"job_id":"failed","worker_id":"w","lease":1,"reason":"best","passed_over":[]}');
INSERT INTO "facts" VALUES(6,12.0,'JobSubmitted','cancelled','{"job_id":"cancelled"}');
INSERT INTO "facts" VALUES(7,12.0,'JobLeased','cancelled','{"job_id":"cancelled","worker_id":"w","lease":1,"reason":"best","passed_over":[]}');
INSERT INTO "facts" VALUES(8,13.0,'JobSubmitted','expired','{"job_id":"expired"}');
INSERT INTO "facts" VALUES(9,13.0,'JobLeased','expired','{"job_id":"expired","worker_id":"w","lease":1,"reason":"best","passed_over":[]}');
INSERT INTO "facts" VALUES(10,14.0,'JobSubmitted','running','{"job_id":"running"}');
INSERT INTO "facts" VALUES(11,14.0,'JobLeased','running','{"job_id":"running","worker_id":"w","lease":1,"reason":"best","passed_over":[]}');
INSERT INTO "facts" VALUES(12,15.0,'JobSubmitted','waiting','{"job_id":"waiting"}');
INSERT INTO "facts" VALUES(13,20.0,'JobStarted','done','{"job_id":"done","lease":1}');
INSERT INTO "facts" VALUES(14,20.0,'JobCompleted','done','{"job_id":"done","lease":1}');
INSERT INTO "facts" VALUES(15,21.0,'JobFailed','failed','{"job_id":"failed","error":"x","lost":false,"cut":false,"fault":"worker"}');
INSERT INTO "facts" VALUES(16,21.0,'JobCancelled','cancelled','{"job_id":"cancelled","reason":"x","written":0}');
INSERT INTO "facts" VALUES(17,21.0,'JobExpired','expired','{"job_id":"expired","limit":"running in all","error":"x","written":0}');
CREATE TABLE jobs (
        id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        model TEXT NOT NULL,
        owner TEXT NOT NULL,
        state TEXT NOT NULL,
        work TEXT NOT NULL,
        limits TEXT NOT NULL,
        lease INTEGER NOT NULL DEFAULT 0,
        outcome TEXT,
        error TEXT,
        submitted_at REAL NOT NULL,
        ended_at REAL
    , priority INTEGER NOT NULL DEFAULT 1, idempotency_key TEXT) STRICT;
INSERT INTO "jobs" VALUES('done','chat','m','default','done','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question done é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,'{"text":"the answer é","finish_reason":"length","usage":{"prompt_tokens":12,"completion_tokens":34},"choices":[]}',NULL,10.0,20.0,1,NULL);
INSERT INTO "jobs" VALUES('failed','chat','m','default','failed','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question failed é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,'x',11.0,21.0,1,NULL);
INSERT INTO "jobs" VALUES('cancelled','chat','m','default','cancelled','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question cancelled é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,'x',12.0,21.0,1,NULL);
INSERT INTO "jobs" VALUES('expired','chat','m','default','expired','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question expired é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,'x',13.0,21.0,1,NULL);
INSERT INTO "jobs" VALUES('running','chat','m','default','leased','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question running é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,NULL,14.0,NULL,1,NULL);
INSERT INTO "jobs" VALUES('waiting','chat','m','default','queued','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question waiting é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',0,NULL,NULL,15.0,NULL,1,NULL);
CREATE TABLE join_token_workers (
        token_id TEXT NOT NULL,
        worker TEXT NOT NULL,
        PRIMARY KEY (token_id, worker)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "join_token_workers" VALUES('t1','wire:w');
CREATE TABLE join_tokens (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL,
        uses_max INTEGER,
        models TEXT NOT NULL
    ) STRICT;
INSERT INTO "join_tokens" VALUES('t1','lab',X'3C469E9D6C5875D37A43F353D4F88E61FCF812C66EEE3457465A40B0DA4153E0',2.0,NULL,NULL,3,'["m"]');
CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        start TEXT NOT NULL,
        scope TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        revoked_at REAL,
        requests_per_minute INTEGER,
        tokens_per_minute INTEGER,
        tokens_per_day INTEGER,
        budget INTEGER
    ) STRICT;
INSERT INTO "keys" VALUES('k1','al',X'32B56ED53348A8587F30C90E5C6406DF95D3B8AB1130B1DA62BCF492A8ED8A63','sk','use',2.0,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE usage (
        owner TEXT NOT NULL,
        day INTEGER NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        PRIMARY KEY (owner, day)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "usage" VALUES('default',0,1,12,34);
CREATE INDEX jobs_open ON jobs (submitted_at) WHERE ended_at IS NULL;
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX facts_of_job ON facts (job_id, number) WHERE job_id IS NOT NULL;
CREATE INDEX facts_of_workers ON facts (at) WHERE job_id IS NULL;
CREATE UNIQUE INDEX jobs_named ON jobs (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX keys_living ON keys (name) WHERE revoked_at IS NULL;
CREATE UNIQUE INDEX join_tokens_living ON join_tokens (name)
        WHERE revoked_at IS NULL;
CREATE INDEX jobs_of_owner ON jobs (owner, submitted_at);
COMMIT;
PRAGMA user_version = 3;
