BEGIN TRANSACTION;
CREATE TABLE accounts (
        name TEXT PRIMARY KEY,
        balance INTEGER NOT NULL,
        budget INTEGER
    ) STRICT, WITHOUT ROWID;
INSERT INTO "accounts" VALUES('user:default',7000,NULL);
INSERT INTO "accounts" VALUES('world',-7000,NULL);
CREATE TABLE aliases (
        name TEXT PRIMARY KEY,
        models TEXT NOT NULL,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "aliases" VALUES('gpt-*','["m","n"]','admin',14.0);
CREATE TABLE approvals (
        name TEXT NOT NULL,
        public_key TEXT,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT;
INSERT INTO "approvals" VALUES('w','8a','admin',13.0);
INSERT INTO "approvals" VALUES('x',NULL,'admin',13.0);
CREATE TABLE batch_results (
        batch_id TEXT NOT NULL,
        line INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) STRICT;
CREATE TABLE batches (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file TEXT NOT NULL,
        time_window TEXT NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        metadata TEXT,
        status TEXT NOT NULL,
        model TEXT NOT NULL,
        lines INTEGER NOT NULL,
        completed INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        errors TEXT NOT NULL,
        output_file TEXT,
        error_file TEXT,
        times TEXT NOT NULL,
        has_results INTEGER NOT NULL DEFAULT 1,
        ended_at REAL
    ) STRICT;
CREATE TABLE browser_sessions (
        number INTEGER PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        key_digest BLOB NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
INSERT INTO "browser_sessions" VALUES(1,X'0101010101010101010101010101010101010101010101010101010101010101',X'AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA',1000000000.0);
CREATE TABLE checkpoints (
        size INTEGER PRIMARY KEY,
        root BLOB NOT NULL,
        at REAL NOT NULL,
        note TEXT NOT NULL
    ) STRICT;
INSERT INTO "checkpoints" VALUES(1,X'F53243C4C8A028564F83964C150F468871633A5B2D2842850A8E0BFF99A0DE28',12.0,'shoal/fb199ef924705393
1
9TJDxMigKFZPg5ZMFQ9GiHFjOlstKEKFCo4L/5mg3ig=
at 1970-01-01T00:00:12.000Z

— shoal/fb199ef924705393 nvguhIAUpQ3rQszp1S+xg7UDw0SC9Ry0bQkg8R2JwjSeAHMrIzASZNzPle6vWbuYuw0zuzsVeegLauIdYcrB2Ok+Vgo=
');
CREATE TABLE deleted_places (
        deletion INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        number INTEGER NOT NULL
    ) STRICT;
CREATE TABLE deployments (
        name TEXT PRIMARY KEY,
        body TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "deployments" VALUES('qwen3','{"name":"qwen3","replicas":2,"by":"admin","on":["anna"],"pinned":true,"idle":60.0}');
CREATE TABLE facts (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        type TEXT NOT NULL,
        job_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "facts" VALUES(1,1.0,'WorkerJoined',NULL,'{"worker_id":"w","offer":{"kinds":["chat"],"models":["m"],"slots":1,"features":[],"context":0,"only_for":[],"remark":"","tasks":[],"streams":true,"device":null,"public_key":"","proven":false,"price":"","neighbour":false,"receipts":true},"cancels":true}');
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
INSERT INTO "facts" VALUES(13,16.0,'JobSubmitted','calling','{"job_id":"calling"}');
INSERT INTO "facts" VALUES(14,17.0,'JobSubmitted','called','{"job_id":"called"}');
INSERT INTO "facts" VALUES(15,17.0,'JobLeased','called','{"job_id":"called","worker_id":"w","lease":1,"reason":"best","passed_over":[]}');
INSERT INTO "facts" VALUES(16,20.0,'JobStarted','done','{"job_id":"done","lease":1}');
INSERT INTO "facts" VALUES(17,20.0,'JobCompleted','done','{"job_id":"done","lease":1,"verdict":"UNSIGNED"}');
INSERT INTO "facts" VALUES(18,21.0,'JobFailed','failed','{"job_id":"failed","error":"x","lost":false,"cut":false,"fault":"worker"}');
INSERT INTO "facts" VALUES(19,21.0,'JobCancelled','cancelled','{"job_id":"cancelled","reason":"x","written":0}');
INSERT INTO "facts" VALUES(20,21.0,'JobExpired','expired','{"job_id":"expired","limit":"running in all","error":"x","written":0}');
INSERT INTO "facts" VALUES(21,22.0,'JobCompleted','called','{"job_id":"called","lease":1,"verdict":"UNSIGNED"}');
CREATE TABLE files (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size INTEGER NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL
    ) STRICT;
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
    , priority INTEGER NOT NULL DEFAULT 1, idempotency_key TEXT, terms TEXT NOT NULL DEFAULT '{}', user TEXT NOT NULL DEFAULT '', function_call BLOB, value BLOB, packed_work BLOB, packed_outcome BLOB, packed_history BLOB) STRICT;
INSERT INTO "jobs" VALUES('done','chat','m','default','done','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question done é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,'{"text":"the answer é","finish_reason":"length","usage":{"prompt_tokens":12,"completion_tokens":34},"choices":[],"output":"","value":"","blobs":[]}',NULL,10.0,20.0,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":{"url":"https://done.example/hook","secret":"shh-shh-shh-shh"},"avoid":[],"detached":false,"near":false,"kept":true}','',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('failed','chat','m','default','failed','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question failed é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,'x',11.0,21.0,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":{"url":"https://failed.example/hook","secret":"shh-shh-shh-shh"},"avoid":[],"detached":false,"near":false,"kept":true}','',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('cancelled','chat','m','default','cancelled','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question cancelled é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,'x',12.0,21.0,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":null,"avoid":[],"detached":false,"near":false,"kept":true}','',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('expired','chat','m','default','expired','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question expired é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,'x',13.0,21.0,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":null,"avoid":[],"detached":false,"near":false,"kept":true}','',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('running','chat','m','default','leased','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question running é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,NULL,NULL,14.0,NULL,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":null,"avoid":[],"detached":false,"near":false,"kept":true}','',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('waiting','chat','m','default','queued','{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"question waiting é 🦦"}],"max_tokens":null,"temperature":null,"options":{"stop":["\n"],"seed":7}}','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',0,NULL,NULL,15.0,NULL,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":null,"avoid":[],"detached":false,"near":false,"kept":true}','',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('calling','call','f','default','queued','','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',0,NULL,NULL,16.0,NULL,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":null,"avoid":[],"detached":false,"near":false,"kept":true}','',X'98A166C40491C401FFC40180CB400400000000000091A676616C75657391C4200000000000000000000000000000000000000000000000000000000000000000C2C2',NULL,NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('called','call','f','default','done','','{"queue":30.0,"first_output":300.0,"silence":120.0,"total":3600.0}',1,'{"blobs":["AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="]}',NULL,17.0,22.0,1,NULL,'{"policy":"fast","privacy":"public","user":"","price":0,"payment_ref":"","form":"","webhook":null,"avoid":[],"detached":false,"near":false,"kept":true}','',X'98A166C40491C401FFC40180CB400400000000000091A676616C75657391C4200000000000000000000000000000000000000000000000000000000000000000C2C2',X'C401FF',NULL,NULL,NULL);
INSERT INTO "jobs" VALUES('packed','chat','m','packer','done','','{"queue":5.0}',1,NULL,NULL,30.0,40.0,1,NULL,'{"price":7}','',NULL,NULL,X'01C30CCD5CE283F3F04A8551348AA88E90B322465E2B2C4D2D06257A8582C4E4ECD41490FA0FF3972D23270B42329955B4524C9E52AC0EB4FE36AFADD55102D5F8A01C1FA3949D5A19A364A510A304B12E46A956A91600',X'01833B011233C5E5A9450A875742E3699437CAC3C5C392647352F3D24B32F0255A23ACA9D6D884E4640B00',X'018B3636D03300E7E460D4EC8490C09EA9CAB1E7AAA4D46250A0A1E627A48C9C88A3D83282A51890B3942A94626B419910E108EC5931DA04264F30438639FA78827363B48921480FA21843CEC0103740325805285D672482420F1AD4A929200300');
INSERT INTO "jobs" VALUES('large','chat','m','packer','done','','{"queue":5.0}',1,NULL,NULL,30.0,40.0,1,NULL,'{"price":7}','',NULL,NULL,X'027B227061727473223A322C22746F6B656E73223A3130347D',X'01833B011233C5E5A9450A875742E3699437CAC3C5C392647352F3D24B32F0255A23ACA9D6D884E4640B00',X'018B3636D03300E7E460D4EC8490C09EA9CAB1E7AAA4D46250A0A1E627A48C9C88A3D83282A51890B3942A94626B419910E108EC5931DA04264F30438639FA78827363B48921480FA21843CEC0103740325805285D672482420F1AD4A929200300');
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
    , priority_max INTEGER NOT NULL DEFAULT 2, hosted_after REAL) STRICT;
INSERT INTO "keys" VALUES('k1','al',X'32B56ED53348A8587F30C90E5C6406DF95D3B8AB1130B1DA62BCF492A8ED8A63','sk','use',2.0,NULL,NULL,NULL,NULL,NULL,NULL,2,NULL);
INSERT INTO "keys" VALUES('k2','bo',X'486D5C99B4177B6CDC8B8F0C164E957B6E8A649F522E11092FEE2EC815AE6FD5','sk','use',3.0,NULL,NULL,NULL,NULL,NULL,NULL,1,20.0);
CREATE TABLE pairing_codes (
        code TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        user TEXT NOT NULL,
        expires_at REAL NOT NULL,
        public_key TEXT,
        claimed_at REAL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "pairing_codes" VALUES('code','default','ada',2000.0,NULL,NULL);
CREATE TABLE payments (
        reference TEXT PRIMARY KEY,
        job_id TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "payments" VALUES('tx1','done',12.0);
CREATE TABLE receipts (
        leaf INTEGER PRIMARY KEY,
        job_id TEXT NOT NULL,
        at REAL NOT NULL,
        body BLOB NOT NULL,
        signature BLOB NOT NULL
    , owner TEXT) STRICT;
INSERT INTO "receipts" VALUES(0,'done',12.0,X'01434E9B0646BA06962186465606065606A67A06060651205F624BAE26E62EAE810559161E4EC189DAFA219EB9E1DAA65ECEA9A581A941D9B9A67EBE055EE151EEC619C1A56EA1B6F0A46D00721DA6A32101034EDFA606C8293C253F0F54CA40FC8096CA0D2804E8B944A9A4C2102406C9268620A375D0C3DC1835AFE8C3D236385B40F34A59624E26CE8C529E59946A55AE04CF1CE0ECA264914819449807739055B552527E0AC8ECEA5A70E8A7E74113A152B2B15F15D571B9ADAD526D2D00',X'99E7291B8C5F6E3E948A572E51DE0E07507F2F033F123838B33BFBBC0B57B7BD7259A851EC71638C5C74AFC826FC04D3E4549A93BE6FDCEA06E3A8EA93B6620F','default');
CREATE TABLE sign_in_codes (
        number INTEGER PRIMARY KEY,
        digest BLOB NOT NULL UNIQUE,
        key_digest BLOB NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
INSERT INTO "sign_in_codes" VALUES(1,X'0202020202020202020202020202020202020202020202020202020202020202',X'AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA',1000000000.0);
CREATE TABLE suspensions (
        name TEXT PRIMARY KEY,
        how TEXT NOT NULL,
        by TEXT NOT NULL,
        at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "suspensions" VALUES('w','paused','admin',12.0);
CREATE TABLE transfers (
        number INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        job_id TEXT,
        debit TEXT NOT NULL,
        credit TEXT NOT NULL,
        amount INTEGER NOT NULL CHECK (amount > 0),
        why TEXT NOT NULL
    ) STRICT;
INSERT INTO "transfers" VALUES(1,12.0,NULL,'world','user:default',7000,'credited');
CREATE TABLE tree (
        number INTEGER PRIMARY KEY,
        hash BLOB NOT NULL
    ) STRICT;
INSERT INTO "tree" VALUES(0,X'F53243C4C8A028564F83964C150F468871633A5B2D2842850A8E0BFF99A0DE28');
CREATE TABLE trusted (
        owner TEXT NOT NULL,
        user TEXT NOT NULL,
        public_key TEXT NOT NULL,
        paired_at REAL NOT NULL,
        PRIMARY KEY (owner, user, public_key)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "trusted" VALUES('default','ada','8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a8a',12.0);
CREATE TABLE unclaimed_works (
        job_id TEXT PRIMARY KEY
    ) STRICT, WITHOUT ROWID;
INSERT INTO "unclaimed_works" VALUES('lost');
CREATE TABLE usage (
        owner TEXT NOT NULL,
        day INTEGER NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        PRIMARY KEY (owner, day)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "usage" VALUES('default',0,2,12,34);
INSERT INTO "usage" VALUES('packer',0,1,12,34);
CREATE TABLE usage_by_minute (
        minute INTEGER PRIMARY KEY,
        jobs INTEGER NOT NULL,
        tokens INTEGER NOT NULL
    , running INTEGER NOT NULL DEFAULT 0, queued INTEGER NOT NULL DEFAULT 0) STRICT;
INSERT INTO "usage_by_minute" VALUES(29000000,1,34,2,5);
CREATE TABLE usage_by_model (
        day INTEGER NOT NULL,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        node TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        cost INTEGER NOT NULL,
        PRIMARY KEY (day, owner, model, node)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "usage_by_model" VALUES(0,'default','','',2,12,34,0);
INSERT INTO "usage_by_model" VALUES(0,'packer','','',1,12,34,0);
CREATE TABLE usage_sums (
        fields INTEGER NOT NULL,
        day INTEGER NOT NULL,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        node TEXT NOT NULL,
        requests INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        cost INTEGER NOT NULL,
        PRIMARY KEY (fields, day, owner, model, node)
    ) STRICT, WITHOUT ROWID;
CREATE TABLE "webhook_deliveries" (
        job_id TEXT PRIMARY KEY,
        url TEXT NOT NULL,
        secret TEXT NOT NULL,
        host TEXT NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        due_at REAL,
        error TEXT
    , owner TEXT NOT NULL DEFAULT '') STRICT;
INSERT INTO "webhook_deliveries" VALUES('done','https://done.example/hook','shh-shh-shh-shh','done.example',0,20.0,NULL,'default');
INSERT INTO "webhook_deliveries" VALUES('failed','https://failed.example/hook','','failed.example',1,NULL,NULL,'default');
CREATE TABLE work_parts (
        number INTEGER PRIMARY KEY,
        job_id TEXT NOT NULL,
        part INTEGER NOT NULL,
        data BLOB NOT NULL
    ) STRICT;
INSERT INTO "work_parts" VALUES(1,'large',0,X'7B22776F726B223A7B226D6F64656C223A226D222C226D65737361676573223A5B7B22726F6C65223A2273797374656D222C22636F6E74656E74223A22C3');
INSERT INTO "work_parts" VALUES(2,'large',1,X'015BA97078148D226A23E4CC84915B0A4B538B41C9562127B1283D15A4FCC3FC65CBC8CB433A4AA0CA1994396394B2532B6394AC146294C0E6C628D52AD50200');
INSERT INTO "work_parts" VALUES(3,'lost',0,X'7B22776F726B223A');
CREATE TABLE writers (
        name TEXT PRIMARY KEY,
        epoch INTEGER NOT NULL,
        number INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "writers" VALUES('calls',0,0);
INSERT INTO "writers" VALUES('hub',0,0);
CREATE INDEX jobs_open ON jobs (submitted_at) WHERE ended_at IS NULL;
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX facts_of_job ON facts (job_id, number) WHERE job_id IS NOT NULL;
CREATE INDEX facts_of_workers ON facts (at) WHERE job_id IS NULL;
CREATE UNIQUE INDEX jobs_named ON jobs (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX keys_living ON keys (name) WHERE revoked_at IS NULL;
CREATE UNIQUE INDEX join_tokens_living ON join_tokens (name)
        WHERE revoked_at IS NULL;
CREATE INDEX jobs_of_user ON jobs (owner, user) WHERE user <> '';
CREATE INDEX receipts_of_job ON receipts (job_id);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_at)
        WHERE due_at IS NOT NULL;
CREATE INDEX jobs_of_owner ON jobs (owner, state);
CREATE INDEX jobs_of_state ON jobs (state);
CREATE INDEX transfers_from ON transfers (debit);
CREATE INDEX transfers_to ON transfers (credit);
CREATE INDEX receipts_of_owner ON receipts (owner) WHERE owner IS NOT NULL;
CREATE INDEX pairing_codes_of_owner ON pairing_codes (owner, expires_at);
CREATE INDEX pairing_codes_by_expiry ON pairing_codes (expires_at);
CREATE INDEX files_of_owner ON files (owner);
CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX batches_of_owner ON batches (owner);
CREATE INDEX batches_open ON batches (created_at) WHERE ended_at IS NULL;
CREATE INDEX batches_open_of_owner ON batches (owner) WHERE ended_at IS NULL;
CREATE INDEX batches_reading ON batches (input_file) WHERE ended_at IS NULL;
CREATE INDEX batches_ended ON batches (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX batches_with_results ON batches (id)
        WHERE has_results AND ended_at IS NOT NULL;
CREATE UNIQUE INDEX work_parts_of_job ON work_parts (job_id, part);
CREATE INDEX approvals_of_name ON approvals (name);
CREATE INDEX worker_facts ON facts (number) WHERE job_id IS NULL;
CREATE INDEX deleted_places_by_number ON deleted_places (number);
CREATE TRIGGER deleted_places_bound AFTER INSERT ON deleted_places BEGIN
        DELETE FROM deleted_places WHERE deletion <= new.deletion - 20000;
    END;
CREATE TRIGGER file_deleted AFTER DELETE ON files BEGIN
        INSERT INTO deleted_places (id, owner, number)
            VALUES (old.id, old.owner, old.number);
    END;
CREATE TRIGGER batch_deleted AFTER DELETE ON batches BEGIN
        INSERT INTO deleted_places (id, owner, number)
            VALUES (old.id, old.owner, old.number);
    END;
CREATE INDEX webhook_deliveries_of_lane ON webhook_deliveries (owner, host, due_at)
        WHERE due_at IS NOT NULL;
COMMIT;
PRAGMA user_version = 22;
