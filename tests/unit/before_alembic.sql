BEGIN TRANSACTION;
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	job_id VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "attempts" VALUES(1,5,'allocated',1,'{"id": 1, "version": 5, "state": "allocated", "since": 1006.06, "job": {"job_id": "7", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": null, "kind": null, "features": []}, "outcome": null, "reason": "", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": ""}','7');
INSERT INTO "attempts" VALUES(2,2,'claimed',1,'{"id": 2, "version": 2, "state": "claimed", "since": 1007.0699999999999, "job": {"job_id": "8_1", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": null, "kind": null, "features": []}, "outcome": null, "reason": "", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": ""}','8_1');
CREATE TABLE claims (
	kind VARCHAR NOT NULL, 
	id INTEGER NOT NULL, 
	host VARCHAR NOT NULL, 
	cpus INTEGER NOT NULL, 
	memory INTEGER NOT NULL, 
	disk INTEGER NOT NULL, 
	PRIMARY KEY (kind, id)
);
INSERT INTO "claims" VALUES('template',1,'h1',0,256,0);
INSERT INTO "claims" VALUES('vm',1,'h1',1,288,0);
INSERT INTO "claims" VALUES('vm',2,'h1',1,288,0);
CREATE TABLE journal (
	seq INTEGER NOT NULL, 
	boot VARCHAR NOT NULL, 
	mono FLOAT NOT NULL, 
	wall FLOAT NOT NULL, 
	kind VARCHAR NOT NULL, 
	id INTEGER NOT NULL, 
	attempt INTEGER, 
	event VARCHAR NOT NULL, 
	source VARCHAR, 
	target VARCHAR, 
	reason VARCHAR NOT NULL, 
	detail VARCHAR NOT NULL, 
	PRIMARY KEY (seq)
);
INSERT INTO "journal" VALUES(1,'boot-1',1001.01,1700001001.01,'attempt',1,1,'submitted',NULL,'queued','','{}');
INSERT INTO "journal" VALUES(2,'boot-1',1001.01,1700001001.01,'template',1,NULL,'needed',NULL,'building','job 7 needs it','{}');
INSERT INTO "journal" VALUES(3,'boot-1',1002.02,1700001002.02,'template',1,NULL,'built','building','ready','','{}');
INSERT INTO "journal" VALUES(4,'boot-1',1002.02,1700001002.02,'attempt',1,1,'admitted','queued','claimed','on h1','{}');
INSERT INTO "journal" VALUES(5,'boot-1',1002.02,1700001002.02,'vm',1,1,'planned',NULL,'planned','','{}');
INSERT INTO "journal" VALUES(6,'boot-1',1004.04,1700001004.04,'vm',1,1,'exists','planned','parked','','{}');
INSERT INTO "journal" VALUES(7,'boot-1',1004.04,1700001004.04,'attempt',1,1,'made','claimed','spawning','','{}');
INSERT INTO "journal" VALUES(8,'boot-1',1004.04,1700001004.04,'vm',1,1,'start','parked','starting','','{}');
INSERT INTO "journal" VALUES(9,'boot-1',1005.05,1700001005.05,'vm',1,1,'registered','starting','joined','','{}');
INSERT INTO "journal" VALUES(10,'boot-1',1005.05,1700001005.05,'attempt',1,1,'all joined','spawning','spawned','','{}');
INSERT INTO "journal" VALUES(11,'boot-1',1006.06,1700001006.06,'attempt',1,1,'runs','spawned','allocated','','{}');
INSERT INTO "journal" VALUES(12,'boot-1',1006.06,1700001006.06,'vm',1,1,'runs','joined','serving','','{}');
INSERT INTO "journal" VALUES(13,'boot-1',1.00706999999999993636e+03,1700001007.07,'attempt',2,2,'submitted',NULL,'queued','','{}');
INSERT INTO "journal" VALUES(14,'boot-1',1.00706999999999993636e+03,1700001007.07,'attempt',2,2,'admitted','queued','claimed','on h1','{}');
INSERT INTO "journal" VALUES(15,'boot-1',1.00706999999999993636e+03,1700001007.07,'vm',2,2,'planned',NULL,'planned','','{}');
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('site','test0');
INSERT INTO "meta" VALUES('next_serial','3');
INSERT INTO "meta" VALUES('next_attempt','3');
INSERT INTO "meta" VALUES('next_template','2');
INSERT INTO "meta" VALUES('boot','boot-1');
CREATE TABLE templates (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "templates" VALUES(1,2,'ready',1,'{"id": 1, "version": 2, "state": "ready", "since": 1002.02, "host": "h1", "image": "slim", "size": {"cpus": 1, "memory": 256, "disk": 0}, "reason": "", "tries": 0, "quarantined": ""}');
CREATE TABLE vms (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	attempt INTEGER, 
	PRIMARY KEY (id)
);
INSERT INTO "vms" VALUES(1,5,'serving',1,'{"id": 1, "version": 5, "state": "serving", "since": 1006.06, "name": "mvtest0-1", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 256, "disk": 0}, "told": {"cpus": 1, "memory": 100, "disk": 0}, "mac": "02:ec:74:00:00:01", "address": "10.9.1.1/16", "attempt": 1, "reason": "", "failed": false, "forget": false, "quarantined": ""}',1);
INSERT INTO "vms" VALUES(2,1,'planned',1,'{"id": 2, "version": 1, "state": "planned", "since": 1007.0699999999999, "name": "mvtest0-2", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 256, "disk": 0}, "told": {"cpus": 1, "memory": 100, "disk": 0}, "mac": "02:ec:74:00:00:02", "address": "10.9.1.2/16", "attempt": 2, "reason": "", "failed": false, "forget": false, "quarantined": ""}',2);
CREATE INDEX ix_attempts_job_id ON attempts (job_id);
CREATE INDEX ix_attempts_live ON attempts (live);
CREATE INDEX ix_vms_attempt ON vms (attempt);
CREATE INDEX ix_vms_live ON vms (live);
CREATE INDEX ix_templates_live ON templates (live);
CREATE INDEX ix_journal_attempt ON journal (attempt);
COMMIT;
