BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	job_id VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "attempts" VALUES(1,2,'queued',1,'{"id": 1, "version": 2, "state": "queued", "since": 901.0, "job": {"job_id": "101", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": true, "stray": false, "not_before": 1010.0, "tries": 2, "replaced": 0, "note": "the hosts are full", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','101');
INSERT INTO "attempts" VALUES(2,3,'queued',1,'{"id": 2, "version": 3, "state": "queued", "since": 902.0, "job": {"job_id": "102", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','102');
INSERT INTO "attempts" VALUES(3,1,'queued',1,'{"id": 3, "version": 1, "state": "queued", "since": 903.0, "job": {"job_id": "103", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": false, "stray": true, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','103');
INSERT INTO "attempts" VALUES(4,2,'claimed',1,'{"id": 4, "version": 2, "state": "claimed", "since": 904.0, "job": {"job_id": "104", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": "instant on h1"}','104');
INSERT INTO "attempts" VALUES(5,3,'spawning',1,'{"id": 5, "version": 3, "state": "spawning", "since": 905.0, "job": {"job_id": "105", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": "instant on h1"}','105');
INSERT INTO "attempts" VALUES(6,1,'spawned',1,'{"id": 6, "version": 1, "state": "spawned", "since": 906.0, "job": {"job_id": "106", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": "instant on h1"}','106');
INSERT INTO "attempts" VALUES(7,2,'spawned',1,'{"id": 7, "version": 2, "state": "spawned", "since": 907.0, "job": {"job_id": "107", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "mv_v5", "choice": "taken as it was submitted"}','107');
INSERT INTO "attempts" VALUES(8,3,'allocated',1,'{"id": 8, "version": 3, "state": "allocated", "since": 908.0, "job": {"job_id": "108", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','108');
INSERT INTO "attempts" VALUES(9,1,'reclaiming',1,'{"id": 9, "version": 1, "state": "reclaiming", "since": 909.0, "job": {"job_id": "109", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "done", "reason": "its job is completing", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','109');
INSERT INTO "attempts" VALUES(10,2,'reclaiming',1,'{"id": 10, "version": 2, "state": "reclaiming", "since": 910.0, "job": {"job_id": "110", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "cancelled", "reason": "CANCELLED", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','110');
INSERT INTO "attempts" VALUES(11,3,'reclaiming',1,'{"id": 11, "version": 3, "state": "reclaiming", "since": 911.0, "job": {"job_id": "111", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "requeued", "reason": "a VM was lost", "gated": false, "stray": false, "not_before": 0.0, "tries": 1, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','111');
INSERT INTO "attempts" VALUES(12,1,'reclaiming',1,'{"id": 12, "version": 1, "state": "reclaiming", "since": 912.0, "job": {"job_id": "112", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "requeued", "reason": "the job was held", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','112');
INSERT INTO "attempts" VALUES(13,2,'reclaiming',1,'{"id": 13, "version": 2, "state": "reclaiming", "since": 913.0, "job": {"job_id": "113", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "revoked", "reason": "it fits on no host", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','113');
INSERT INTO "attempts" VALUES(14,3,'reclaiming',1,'{"id": 14, "version": 3, "state": "reclaiming", "since": 914.0, "job": {"job_id": "114", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "failed", "reason": "no VM could be made", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','114');
INSERT INTO "attempts" VALUES(15,1,'allocated',1,'{"id": 15, "version": 1, "state": "allocated", "since": 915.0, "job": {"job_id": "115", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": null, "reason": "", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "its job runs elsewhere", "pin": "", "choice": ""}','115');
INSERT INTO "attempts" VALUES(16,2,'done',0,'{"id": 16, "version": 2, "state": "done", "since": 916.0, "job": {"job_id": "116", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "done", "reason": "COMPLETED", "gated": false, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','116');
INSERT INTO "attempts" VALUES(17,3,'cancelled',0,'{"id": 17, "version": 3, "state": "cancelled", "since": 917.0, "job": {"job_id": "117", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "cancelled", "reason": "", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','117');
INSERT INTO "attempts" VALUES(18,1,'requeued',0,'{"id": 18, "version": 1, "state": "requeued", "since": 918.0, "job": {"job_id": "118", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "requeued", "reason": "", "gated": true, "stray": true, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','118');
INSERT INTO "attempts" VALUES(19,2,'revoked',0,'{"id": 19, "version": 2, "state": "revoked", "since": 919.0, "job": {"job_id": "119", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "revoked", "reason": "", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','119');
INSERT INTO "attempts" VALUES(20,3,'failed',0,'{"id": 20, "version": 3, "state": "failed", "since": 920.0, "job": {"job_id": "120", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0}, "image": "slim", "kind": null, "features": [], "account": ""}, "outcome": "failed", "reason": "", "gated": true, "stray": false, "not_before": 0.0, "tries": 0, "replaced": 0, "note": "", "work_dir": "", "quarantined": "", "pin": "", "choice": ""}','120');
CREATE TABLE claims (
	kind VARCHAR NOT NULL, 
	id INTEGER NOT NULL, 
	host VARCHAR NOT NULL, 
	cpus INTEGER NOT NULL, 
	memory INTEGER NOT NULL, 
	disk INTEGER NOT NULL, 
	PRIMARY KEY (kind, id)
);
INSERT INTO "claims" VALUES('vm',1,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',2,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',3,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',4,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',5,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',6,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',7,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',8,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',9,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',10,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',11,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',12,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',13,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',14,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',15,'h2',1,416,0);
INSERT INTO "claims" VALUES('vm',16,'h2',1,416,0);
INSERT INTO "claims" VALUES('vm',17,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',18,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',19,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',20,'h3',1,416,0);
INSERT INTO "claims" VALUES('vm',21,'h3',1,416,0);
INSERT INTO "claims" VALUES('vm',22,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',25,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',26,'h1',1,416,0);
INSERT INTO "claims" VALUES('vm',27,'h1',1,416,0);
INSERT INTO "claims" VALUES('template',1,'h1',1,256,0);
INSERT INTO "claims" VALUES('template',2,'h2',1,256,0);
INSERT INTO "claims" VALUES('template',3,'h1',1,256,0);
INSERT INTO "claims" VALUES('template',4,'h1',1,256,0);
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
INSERT INTO "journal" VALUES(1,'boot-1',1000.0,1700000000.0,'attempt',1,1,'noted',NULL,'queued','','{}');
INSERT INTO "journal" VALUES(2,'boot-1',1000.0,1700000000.0,'attempt',2,2,'noted',NULL,'queued','','{}');
INSERT INTO "journal" VALUES(3,'boot-1',1000.0,1700000000.0,'attempt',3,3,'noted',NULL,'queued','','{}');
INSERT INTO "journal" VALUES(4,'boot-1',1000.0,1700000000.0,'attempt',4,4,'noted',NULL,'claimed','','{}');
INSERT INTO "journal" VALUES(5,'boot-1',1000.0,1700000000.0,'attempt',5,5,'noted',NULL,'spawning','','{}');
INSERT INTO "journal" VALUES(6,'boot-1',1000.0,1700000000.0,'attempt',6,6,'noted',NULL,'spawned','','{}');
INSERT INTO "journal" VALUES(7,'boot-1',1000.0,1700000000.0,'attempt',7,7,'noted',NULL,'spawned','','{}');
INSERT INTO "journal" VALUES(8,'boot-1',1000.0,1700000000.0,'attempt',8,8,'noted',NULL,'allocated','','{}');
INSERT INTO "journal" VALUES(9,'boot-1',1000.0,1700000000.0,'attempt',9,9,'noted',NULL,'reclaiming','','{}');
INSERT INTO "journal" VALUES(10,'boot-1',1000.0,1700000000.0,'attempt',10,10,'noted',NULL,'reclaiming','','{}');
INSERT INTO "journal" VALUES(11,'boot-1',1000.0,1700000000.0,'attempt',11,11,'noted',NULL,'reclaiming','','{}');
INSERT INTO "journal" VALUES(12,'boot-1',1000.0,1700000000.0,'attempt',12,12,'noted',NULL,'reclaiming','','{}');
INSERT INTO "journal" VALUES(13,'boot-1',1000.0,1700000000.0,'attempt',13,13,'noted',NULL,'reclaiming','','{}');
INSERT INTO "journal" VALUES(14,'boot-1',1000.0,1700000000.0,'attempt',14,14,'noted',NULL,'reclaiming','','{}');
INSERT INTO "journal" VALUES(15,'boot-1',1000.0,1700000000.0,'attempt',15,15,'noted',NULL,'allocated','','{}');
INSERT INTO "journal" VALUES(16,'boot-1',1000.0,1700000000.0,'attempt',16,16,'noted',NULL,'done','','{}');
INSERT INTO "journal" VALUES(17,'boot-1',1000.0,1700000000.0,'attempt',17,17,'noted',NULL,'cancelled','','{}');
INSERT INTO "journal" VALUES(18,'boot-1',1000.0,1700000000.0,'attempt',18,18,'noted',NULL,'requeued','','{}');
INSERT INTO "journal" VALUES(19,'boot-1',1000.0,1700000000.0,'attempt',19,19,'noted',NULL,'revoked','','{}');
INSERT INTO "journal" VALUES(20,'boot-1',1000.0,1700000000.0,'attempt',20,20,'noted',NULL,'failed','','{}');
INSERT INTO "journal" VALUES(21,'boot-1',1000.0,1700000000.0,'vm',1,4,'noted',NULL,'planned','','{}');
INSERT INTO "journal" VALUES(22,'boot-1',1000.0,1700000000.0,'vm',2,NULL,'noted',NULL,'parked','','{}');
INSERT INTO "journal" VALUES(23,'boot-1',1000.0,1700000000.0,'vm',3,5,'noted',NULL,'starting','','{}');
INSERT INTO "journal" VALUES(24,'boot-1',1000.0,1700000000.0,'vm',4,6,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(25,'boot-1',1000.0,1700000000.0,'vm',5,7,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(26,'boot-1',1000.0,1700000000.0,'vm',6,8,'noted',NULL,'serving','','{}');
INSERT INTO "journal" VALUES(27,'boot-1',1000.0,1700000000.0,'vm',7,11,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(28,'boot-1',1000.0,1700000000.0,'vm',8,15,'noted',NULL,'serving','','{}');
INSERT INTO "journal" VALUES(29,'boot-1',1000.0,1700000000.0,'vm',9,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(30,'boot-1',1000.0,1700000000.0,'vm',10,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(31,'boot-1',1000.0,1700000000.0,'vm',11,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(32,'boot-1',1000.0,1700000000.0,'vm',12,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(33,'boot-1',1000.0,1700000000.0,'vm',13,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(34,'boot-1',1000.0,1700000000.0,'vm',14,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(35,'boot-1',1000.0,1700000000.0,'vm',15,8,'noted',NULL,'lost','','{}');
INSERT INTO "journal" VALUES(36,'boot-1',1000.0,1700000000.0,'vm',16,NULL,'noted',NULL,'lost','','{}');
INSERT INTO "journal" VALUES(37,'boot-1',1000.0,1700000000.0,'vm',17,9,'noted',NULL,'releasing','','{}');
INSERT INTO "journal" VALUES(38,'boot-1',1000.0,1700000000.0,'vm',18,9,'noted',NULL,'releasing','','{}');
INSERT INTO "journal" VALUES(39,'boot-1',1000.0,1700000000.0,'vm',19,10,'noted',NULL,'releasing','','{}');
INSERT INTO "journal" VALUES(40,'boot-1',1000.0,1700000000.0,'vm',20,12,'noted',NULL,'releasing','','{}');
INSERT INTO "journal" VALUES(41,'boot-1',1000.0,1700000000.0,'vm',21,NULL,'noted',NULL,'releasing','','{}');
INSERT INTO "journal" VALUES(42,'boot-1',1000.0,1700000000.0,'vm',22,NULL,'noted',NULL,'joined','','{}');
INSERT INTO "journal" VALUES(43,'boot-1',1000.0,1700000000.0,'vm',23,16,'noted',NULL,'gone','','{}');
INSERT INTO "journal" VALUES(44,'boot-1',1000.0,1700000000.0,'vm',24,17,'noted',NULL,'gone','','{}');
INSERT INTO "journal" VALUES(45,'boot-1',1000.0,1700000000.0,'vm',25,15,'noted',NULL,'serving','','{}');
INSERT INTO "journal" VALUES(46,'boot-1',1000.0,1700000000.0,'vm',26,NULL,'noted',NULL,'releasing','','{}');
INSERT INTO "journal" VALUES(47,'boot-1',1000.0,1700000000.0,'vm',27,13,'noted',NULL,'starting','','{}');
INSERT INTO "journal" VALUES(48,'boot-1',1000.0,1700000000.0,'template',1,NULL,'noted',NULL,'ready','','{}');
INSERT INTO "journal" VALUES(49,'boot-1',1000.0,1700000000.0,'template',2,NULL,'noted',NULL,'building','','{}');
INSERT INTO "journal" VALUES(50,'boot-1',1000.0,1700000000.0,'template',3,NULL,'noted',NULL,'broken','','{}');
INSERT INTO "journal" VALUES(51,'boot-1',1000.0,1700000000.0,'template',4,NULL,'noted',NULL,'retiring','','{}');
INSERT INTO "journal" VALUES(52,'boot-1',1000.0,1700000000.0,'template',5,NULL,'noted',NULL,'absent','','{}');
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('site','test0');
INSERT INTO "meta" VALUES('next_serial','28');
INSERT INTO "meta" VALUES('next_attempt','21');
INSERT INTO "meta" VALUES('next_template','6');
INSERT INTO "meta" VALUES('hosts','["h1", "h2", "h4"]');
INSERT INTO "meta" VALUES('boot','boot-1');
CREATE TABLE templates (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "templates" VALUES(1,1,'ready',1,'{"id": 1, "version": 1, "state": "ready", "since": 900.0, "host": "h1", "image": "slim", "size": {"cpus": 1, "memory": 256, "disk": 0}, "reason": "", "tries": 0, "quarantined": "", "account": ""}');
INSERT INTO "templates" VALUES(2,1,'building',1,'{"id": 2, "version": 1, "state": "building", "since": 900.0, "host": "h2", "image": "slim", "size": {"cpus": 1, "memory": 256, "disk": 0}, "reason": "", "tries": 0, "quarantined": "", "account": "physics"}');
INSERT INTO "templates" VALUES(3,1,'broken',1,'{"id": 3, "version": 1, "state": "broken", "since": 900.0, "host": "h1", "image": "warm", "size": {"cpus": 1, "memory": 256, "disk": 0}, "reason": "it does not boot", "tries": 2, "quarantined": "", "account": ""}');
INSERT INTO "templates" VALUES(4,1,'retiring',1,'{"id": 4, "version": 1, "state": "retiring", "since": 900.0, "host": "h1", "image": "old", "size": {"cpus": 1, "memory": 256, "disk": 0}, "reason": "", "tries": 0, "quarantined": "", "account": ""}');
INSERT INTO "templates" VALUES(5,1,'absent',0,'{"id": 5, "version": 1, "state": "absent", "since": 900.0, "host": "h1", "image": "older", "size": {"cpus": 1, "memory": 256, "disk": 0}, "reason": "", "tries": 0, "quarantined": "", "account": ""}');
CREATE TABLE vms (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	attempt INTEGER, 
	PRIMARY KEY (id)
);
INSERT INTO "vms" VALUES(1,2,'planned',1,'{"id": 1, "version": 2, "state": "planned", "since": 951.0, "name": "mvtest0-1", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:01", "address": "10.9.1.1/16", "attempt": 4, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',4);
INSERT INTO "vms" VALUES(2,3,'parked',1,'{"id": 2, "version": 3, "state": "parked", "since": 952.0, "name": "mvtest0-2", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:02", "address": "10.9.1.2/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "parked", "offer": null, "offered": 0.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(3,4,'starting',1,'{"id": 3, "version": 4, "state": "starting", "since": 953.0, "name": "mvtest0-3", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:03", "address": "10.9.1.3/16", "attempt": 5, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',5);
INSERT INTO "vms" VALUES(4,1,'joined',1,'{"id": 4, "version": 1, "state": "joined", "since": 954.0, "name": "mvtest0-4", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:04", "address": "10.9.1.4/16", "attempt": 6, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',6);
INSERT INTO "vms" VALUES(5,2,'joined',1,'{"id": 5, "version": 2, "state": "joined", "since": 955.0, "name": "mvtest0-5", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:05", "address": "10.9.1.5/16", "attempt": 7, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "taken", "offered": 980.5, "unwanted": ""}',7);
INSERT INTO "vms" VALUES(6,3,'serving',1,'{"id": 6, "version": 3, "state": "serving", "since": 956.0, "name": "mvtest0-6", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:06", "address": "10.9.1.6/16", "attempt": 8, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "closed", "offered": 970.0, "unwanted": ""}',8);
INSERT INTO "vms" VALUES(7,4,'joined',1,'{"id": 7, "version": 4, "state": "joined", "since": 957.0, "name": "mvtest0-7", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:07", "address": "10.9.1.7/16", "attempt": 11, "reason": "its QEMU has ended", "failed": true, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',11);
INSERT INTO "vms" VALUES(8,1,'serving',1,'{"id": 8, "version": 1, "state": "serving", "since": 958.0, "name": "mvtest0-8", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:08", "address": "10.9.1.8/16", "attempt": 15, "reason": "its QEMU has ended", "failed": true, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',15);
INSERT INTO "vms" VALUES(9,2,'joined',1,'{"id": 9, "version": 2, "state": "joined", "since": 959.0, "name": "mvtest0-9", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:09", "address": "10.9.1.9/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "open", "offered": 981.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(10,3,'joined',1,'{"id": 10, "version": 3, "state": "joined", "since": 960.0, "name": "mvtest0-10", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:0a", "address": "10.9.1.10/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "closing", "offered": 982.0, "unwanted": "it is older than 3600 s"}',NULL);
INSERT INTO "vms" VALUES(11,4,'joined',1,'{"id": 11, "version": 4, "state": "joined", "since": 961.0, "name": "mvtest0-11", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:0b", "address": "10.9.1.11/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "closed", "offered": 983.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(12,1,'joined',1,'{"id": 12, "version": 1, "state": "joined", "since": 962.0, "name": "mvtest0-12", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:0c", "address": "10.9.1.12/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "closing", "offered": 984.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(13,2,'joined',1,'{"id": 13, "version": 2, "state": "joined", "since": 963.0, "name": "mvtest0-13", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:0d", "address": "10.9.1.13/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": null, "offered": 0.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(14,3,'joined',1,'{"id": 14, "version": 3, "state": "joined", "since": 964.0, "name": "mvtest0-14", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:0e", "address": "10.9.1.14/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "taken", "offered": 985.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(15,4,'lost',1,'{"id": 15, "version": 4, "state": "lost", "since": 965.0, "name": "mvtest0-15", "host": "h2", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:0f", "address": "10.9.1.15/16", "attempt": 8, "reason": "", "failed": true, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',8);
INSERT INTO "vms" VALUES(16,1,'lost',1,'{"id": 16, "version": 1, "state": "lost", "since": 966.0, "name": "mvtest0-16", "host": "h2", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:10", "address": "10.9.1.16/16", "attempt": null, "reason": "", "failed": true, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "open", "offered": 986.0, "unwanted": "its host is old"}',NULL);
INSERT INTO "vms" VALUES(17,2,'releasing',1,'{"id": 17, "version": 2, "state": "releasing", "since": 967.0, "name": "mvtest0-17", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:11", "address": "10.9.1.17/16", "attempt": 9, "reason": "", "failed": false, "forget": true, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',9);
INSERT INTO "vms" VALUES(18,3,'releasing',1,'{"id": 18, "version": 3, "state": "releasing", "since": 968.0, "name": "mvtest0-18", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:12", "address": "10.9.1.18/16", "attempt": 9, "reason": "the VM died", "failed": true, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',9);
INSERT INTO "vms" VALUES(19,4,'releasing',1,'{"id": 19, "version": 4, "state": "releasing", "since": 969.0, "name": "mvtest0-19", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:13", "address": "10.9.1.19/16", "attempt": 10, "reason": "no luck", "failed": true, "forget": true, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',10);
INSERT INTO "vms" VALUES(20,1,'releasing',1,'{"id": 20, "version": 1, "state": "releasing", "since": 970.0, "name": "mvtest0-20", "host": "h3", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:14", "address": "10.9.1.20/16", "attempt": 12, "reason": "an operator says that host h3 is off", "failed": true, "forget": false, "fenced": true, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',12);
INSERT INTO "vms" VALUES(21,2,'releasing',1,'{"id": 21, "version": 2, "state": "releasing", "since": 971.0, "name": "mvtest0-21", "host": "h3", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:15", "address": "10.9.1.21/16", "attempt": null, "reason": "an operator says that host h3 is off", "failed": true, "forget": true, "fenced": true, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(22,3,'joined',1,'{"id": 22, "version": 3, "state": "joined", "since": 972.0, "name": "mvtest0-22", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:16", "address": "10.9.1.22/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "a fault of Multiverse", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "open", "offered": 987.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(23,4,'gone',0,'{"id": 23, "version": 4, "state": "gone", "since": 973.0, "name": "mvtest0-23", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:17", "address": "10.9.1.23/16", "attempt": 16, "reason": "", "failed": true, "forget": true, "fenced": true, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',16);
INSERT INTO "vms" VALUES(24,1,'gone',0,'{"id": 24, "version": 1, "state": "gone", "since": 974.0, "name": "mvtest0-24", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:18", "address": "10.9.1.24/16", "attempt": 17, "reason": "", "failed": false, "forget": true, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": "joined", "offer": "taken", "offered": 3.0, "unwanted": ""}',17);
INSERT INTO "vms" VALUES(25,2,'serving',1,'{"id": 25, "version": 2, "state": "serving", "since": 975.0, "name": "mvtest0-25", "host": "h1", "image": "slim", "kind": "full", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:19", "address": "10.9.1.25/16", "attempt": 15, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": null, "account": "physics", "origin": null, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',15);
INSERT INTO "vms" VALUES(26,3,'releasing',1,'{"id": 26, "version": 3, "state": "releasing", "since": 976.0, "name": "mvtest0-26", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:1a", "address": "10.9.1.26/16", "attempt": null, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',NULL);
INSERT INTO "vms" VALUES(27,4,'starting',1,'{"id": 27, "version": 4, "state": "starting", "since": 977.0, "name": "mvtest0-27", "host": "h1", "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0}, "told": {"cpus": 1, "memory": 300, "disk": 0}, "mac": "02:00:00:00:00:1b", "address": "10.9.1.27/16", "attempt": 13, "reason": "", "failed": false, "forget": false, "fenced": false, "quarantined": "", "parent": {"cpus": 1, "memory": 256, "disk": 0}, "account": "", "origin": 1, "pool": null, "offer": null, "offered": 0.0, "unwanted": ""}',13);
CREATE INDEX ix_attempts_live ON attempts (id) WHERE live = 1;
CREATE INDEX ix_attempts_job_id ON attempts (job_id);
CREATE INDEX ix_vms_attempt ON vms (attempt);
CREATE INDEX ix_vms_live ON vms (id) WHERE live = 1;
CREATE INDEX ix_templates_live ON templates (id) WHERE live = 1;
CREATE INDEX ix_journal_attempt ON journal (attempt);
COMMIT;
