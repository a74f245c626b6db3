BEGIN TRANSACTION;
CREATE TABLE facts (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        type TEXT NOT NULL,
        job_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "facts" VALUES(1,100.0,'WorkerJoined',NULL,'{"worker_id":"grandsage:otter/m","offer":{"kinds":["chat"],"models":["m"],"slots":2,"features":["options","continue","stop"],"remark":"odd"},"cancels":true}');
INSERT INTO "facts" VALUES(2,101.0,'JobSubmitted','done','{"job_id":"done"}');
INSERT INTO "facts" VALUES(3,101.0,'JobSubmitted','failed','{"job_id":"failed"}');
INSERT INTO "facts" VALUES(4,101.0,'JobSubmitted','cancelled','{"job_id":"cancelled"}');
INSERT INTO "facts" VALUES(5,101.0,'JobSubmitted','expired','{"job_id":"expired"}');
INSERT INTO "facts" VALUES(6,101.0,'JobSubmitted','running','{"job_id":"running"}');
INSERT INTO "facts" VALUES(7,101.0,'JobSubmitted','waiting','{"job_id":"waiting"}');
INSERT INTO "facts" VALUES(8,102.0,'JobLeased','done','{"job_id":"done","worker_id":"grandsage:otter/m","lease":1,"reason":"least busy","passed_over":[{"reason":"all slots busy","count":1,"workers":["x"]}]}');
INSERT INTO "facts" VALUES(9,102.0,'JobStarted','done','{"job_id":"done","lease":1}');
INSERT INTO "facts" VALUES(10,102.0,'JobLeased','failed','{"job_id":"failed","worker_id":"grandsage:otter/m","lease":1,"reason":"least busy","passed_over":[{"reason":"all slots busy","count":1,"workers":["x"]}]}');
INSERT INTO "facts" VALUES(11,102.0,'JobStarted','failed','{"job_id":"failed","lease":1}');
INSERT INTO "facts" VALUES(12,102.0,'JobLeased','cancelled','{"job_id":"cancelled","worker_id":"grandsage:otter/m","lease":1,"reason":"least busy","passed_over":[{"reason":"all slots busy","count":1,"workers":["x"]}]}');
INSERT INTO "facts" VALUES(13,102.0,'JobStarted','cancelled','{"job_id":"cancelled","lease":1}');
INSERT INTO "facts" VALUES(14,102.0,'JobLeased','running','{"job_id":"running","worker_id":"grandsage:otter/m","lease":1,"reason":"least busy","passed_over":[{"reason":"all slots busy","count":1,"workers":["x"]}]}');
INSERT INTO "facts" VALUES(15,102.0,'JobStarted','running','{"job_id":"running","lease":1}');
INSERT INTO "facts" VALUES(16,103.0,'JobCompleted','done','{"job_id":"done","lease":1}');
INSERT INTO "facts" VALUES(17,103.0,'JobFailed','failed','{"job_id":"failed","error":"out of memory","lost":false,"cut":false}');
INSERT INTO "facts" VALUES(18,103.0,'JobCancelled','cancelled','{"job_id":"cancelled","reason":"the client left"}');
INSERT INTO "facts" VALUES(19,103.0,'JobExpired','expired','{"job_id":"expired","limit":"waiting in the queue","error":"no worker"}');
INSERT INTO "facts" VALUES(20,104.0,'CameLate','failed','{"job_id":"failed","lease":1,"worker_id":"grandsage:otter/m","what":"completed"}');
INSERT INTO "facts" VALUES(21,104.0,'JobRequeued','running','{"job_id":"running","lease":1,"reason":"worker lost: reset","refused_by":null}');
INSERT INTO "facts" VALUES(22,104.0,'JobLeased','running','{"job_id":"running","worker_id":"grandsage:otter/m","lease":2,"reason":"only one","passed_over":[]}');
INSERT INTO "facts" VALUES(23,105.0,'WorkerDraining',NULL,'{"worker_id":"grandsage:otter/m","reason":"bye"}');
INSERT INTO "facts" VALUES(24,105.0,'WorkerLost',NULL,'{"worker_id":"grandsage:otter/m","reason":"reset"}');
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
    ) STRICT;
INSERT INTO "jobs" VALUES('done','chat','m','default','done','{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"question done é 🦦"}],"max_tokens":9,"temperature":0.5,"options":{"stop":["\n"],"seed":7}}','{"queue":1.5,"first_output":2.5,"silence":3.5,"total":4.5}',1,'{"text":"the answer é","finish_reason":"length","usage":{"prompt_tokens":12,"completion_tokens":34}}',NULL,101.0,103.0);
INSERT INTO "jobs" VALUES('failed','chat','m','default','failed','{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"question failed é 🦦"}],"max_tokens":9,"temperature":0.5,"options":{"stop":["\n"],"seed":7}}','{"queue":1.5,"first_output":2.5,"silence":3.5,"total":4.5}',1,NULL,'out of memory',101.0,103.0);
INSERT INTO "jobs" VALUES('cancelled','chat','m','default','cancelled','{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"question cancelled é 🦦"}],"max_tokens":9,"temperature":0.5,"options":{"stop":["\n"],"seed":7}}','{"queue":1.5,"first_output":2.5,"silence":3.5,"total":4.5}',1,NULL,'the client left',101.0,103.0);
INSERT INTO "jobs" VALUES('expired','chat','m','default','expired','{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"question expired é 🦦"}],"max_tokens":9,"temperature":0.5,"options":{"stop":["\n"],"seed":7}}','{"queue":1.5,"first_output":2.5,"silence":3.5,"total":4.5}',0,NULL,'no worker',101.0,103.0);
INSERT INTO "jobs" VALUES('running','chat','m','default','leased','{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"question running é 🦦"}],"max_tokens":9,"temperature":0.5,"options":{"stop":["\n"],"seed":7}}','{"queue":1.5,"first_output":2.5,"silence":3.5,"total":4.5}',2,NULL,NULL,101.0,NULL);
INSERT INTO "jobs" VALUES('waiting','chat','m','default','queued','{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"question waiting é 🦦"}],"max_tokens":9,"temperature":0.5,"options":{"stop":["\n"],"seed":7}}','{"queue":1.5,"first_output":2.5,"silence":3.5,"total":4.5}',0,NULL,NULL,101.0,NULL);
CREATE INDEX jobs_open ON jobs (submitted_at) WHERE ended_at IS NULL;
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX facts_of_job ON facts (job_id, number) WHERE job_id IS NOT NULL;
CREATE INDEX facts_of_workers ON facts (at) WHERE job_id IS NULL;
COMMIT;
PRAGMA user_version = 1;
