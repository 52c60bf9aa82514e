BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE attempts (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	job_id VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "attempts" VALUES(1,2,'queued',1,'{"id": 1, "version": 2, "state": "queued", "since": 901.0, "job": {"job_id": "101", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 1010.0, "tries": 2, "replaced": 0, "note": {"kind": "said", "figures": [["text", "the hosts are full"]]}, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','101');
INSERT INTO "attempts" VALUES(2,3,'ungated',1,'{"id": 2, "version": 3, "state": "ungated", "since": 902.0, "job": {"job_id": "102", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','102');
INSERT INTO "attempts" VALUES(3,1,'stray',1,'{"id": 3, "version": 1, "state": "stray", "since": 903.0, "job": {"job_id": "103", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','103');
INSERT INTO "attempts" VALUES(4,2,'claimed',1,'{"id": 4, "version": 2, "state": "claimed", "since": 904.0, "job": {"job_id": "104", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": {"kind": "said", "figures": [["text", "instant on h1"]]}, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','104');
INSERT INTO "attempts" VALUES(5,3,'spawning',1,'{"id": 5, "version": 3, "state": "spawning", "since": 905.0, "job": {"job_id": "105", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": {"kind": "said", "figures": [["text", "instant on h1"]]}, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','105');
INSERT INTO "attempts" VALUES(6,1,'spawned',1,'{"id": 6, "version": 1, "state": "spawned", "since": 906.0, "job": {"job_id": "106", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": {"kind": "said", "figures": [["text", "instant on h1"]]}, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','106');
INSERT INTO "attempts" VALUES(7,2,'adding_user',1,'{"id": 7, "version": 2, "state": "adding_user", "since": 907.0, "job": {"job_id": "107", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "mv_v5", "choice": {"kind": "said", "figures": [["text", "taken as it was submitted"]]}, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','107');
INSERT INTO "attempts" VALUES(8,3,'allocated',1,'{"id": 8, "version": 3, "state": "allocated", "since": 908.0, "job": {"job_id": "108", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','108');
INSERT INTO "attempts" VALUES(9,1,'reclaiming',1,'{"id": 9, "version": 1, "state": "reclaiming", "since": 909.0, "job": {"job_id": "109", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "done", "reason": {"kind": "said", "figures": [["text", "its job is completing"]]}, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','109');
INSERT INTO "attempts" VALUES(10,2,'reclaiming',1,'{"id": 10, "version": 2, "state": "reclaiming", "since": 910.0, "job": {"job_id": "110", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "cancelled", "reason": {"kind": "said", "figures": [["text", "CANCELLED"]]}, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','110');
INSERT INTO "attempts" VALUES(11,3,'returning',1,'{"id": 11, "version": 3, "state": "returning", "since": 911.0, "job": {"job_id": "111", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "requeued", "reason": {"kind": "said", "figures": [["text", "a VM was lost"]]}, "not_before": 0.0, "tries": 1, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','111');
INSERT INTO "attempts" VALUES(12,1,'reclaiming',1,'{"id": 12, "version": 1, "state": "reclaiming", "since": 912.0, "job": {"job_id": "112", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "requeued", "reason": {"kind": "said", "figures": [["text", "the job was held"]]}, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','112');
INSERT INTO "attempts" VALUES(13,2,'revoking',1,'{"id": 13, "version": 2, "state": "revoking", "since": 913.0, "job": {"job_id": "113", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "revoked", "reason": {"kind": "said", "figures": [["text", "it fits on no host"]]}, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','113');
INSERT INTO "attempts" VALUES(14,3,'revoking',1,'{"id": 14, "version": 3, "state": "revoking", "since": 914.0, "job": {"job_id": "114", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "failed", "reason": {"kind": "said", "figures": [["text", "no VM could be made"]]}, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','114');
INSERT INTO "attempts" VALUES(15,1,'allocated',1,'{"id": 15, "version": 1, "state": "allocated", "since": 915.0, "job": {"job_id": "115", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": null, "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": {"kind": "said", "figures": [["text", "its job runs elsewhere"]]}, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','115');
INSERT INTO "attempts" VALUES(16,2,'done',0,'{"id": 16, "version": 2, "state": "done", "since": 916.0, "job": {"job_id": "116", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "done", "reason": {"kind": "said", "figures": [["text", "COMPLETED"]]}, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','116');
INSERT INTO "attempts" VALUES(17,3,'cancelled',0,'{"id": 17, "version": 3, "state": "cancelled", "since": 917.0, "job": {"job_id": "117", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "cancelled", "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','117');
INSERT INTO "attempts" VALUES(18,1,'requeued',0,'{"id": 18, "version": 1, "state": "requeued", "since": 918.0, "job": {"job_id": "118", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "requeued", "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','118');
INSERT INTO "attempts" VALUES(19,2,'revoked',0,'{"id": 19, "version": 2, "state": "revoked", "since": 919.0, "job": {"job_id": "119", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "revoked", "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','119');
INSERT INTO "attempts" VALUES(20,3,'failed',0,'{"id": 20, "version": 3, "state": "failed", "since": 920.0, "job": {"job_id": "120", "submitted": 500, "restarts": 0}, "job_name": "hello", "uid": 1000, "request": {"nodes": 1, "size": {"cpus": 1, "memory": 100, "disk": 0, "net": 0}, "image": "slim", "kind": null, "features": [], "account": "", "placement": null, "per_host": 0, "sockets": 1}, "outcome": "failed", "reason": null, "not_before": 0.0, "tries": 0, "replaced": 0, "note": null, "work_dir": "", "quarantined": null, "pin": "", "choice": null, "overtaken": 0, "origin": "", "caused": 0, "short_runs": 0, "failed_on": []}','120');
CREATE TABLE claims (
	kind VARCHAR NOT NULL, 
	id INTEGER NOT NULL, 
	domain VARCHAR NOT NULL, 
	cpus INTEGER NOT NULL, 
	memory INTEGER NOT NULL, 
	disk INTEGER NOT NULL, net INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (kind, id, domain)
);
INSERT INTO "claims" VALUES('vm',1,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',2,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',3,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',4,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',5,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',6,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',7,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',8,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',9,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',10,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',11,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',12,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',13,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',14,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',15,'h2',1,416,0,0);
INSERT INTO "claims" VALUES('vm',16,'h2',1,416,0,0);
INSERT INTO "claims" VALUES('vm',17,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',18,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',19,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',20,'h3',1,416,0,0);
INSERT INTO "claims" VALUES('vm',21,'h3',1,416,0,0);
INSERT INTO "claims" VALUES('vm',22,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',25,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',26,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('vm',27,'h1',1,416,0,0);
INSERT INTO "claims" VALUES('template',1,'h1',1,256,0,0);
INSERT INTO "claims" VALUES('template',2,'h2',1,256,0,0);
INSERT INTO "claims" VALUES('template',3,'h1',1,256,0,0);
INSERT INTO "claims" VALUES('template',4,'h1',1,256,0,0);
CREATE TABLE ended (
	kind VARCHAR NOT NULL, 
	id INTEGER NOT NULL, 
	wall FLOAT NOT NULL, 
	PRIMARY KEY (kind, id)
);
INSERT INTO "ended" VALUES('attempt',16,1700000000.0);
INSERT INTO "ended" VALUES('attempt',17,1700000000.0);
INSERT INTO "ended" VALUES('attempt',18,1700000000.0);
INSERT INTO "ended" VALUES('attempt',19,1700000000.0);
INSERT INTO "ended" VALUES('attempt',20,1700000000.0);
INSERT INTO "ended" VALUES('vm',23,1700000000.0);
INSERT INTO "ended" VALUES('vm',24,1700000000.0);
INSERT INTO "ended" VALUES('template',5,1700000000.0);
CREATE TABLE hosts (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "hosts" VALUES(1,0,'known',1,'{"name":"h1","source":"h1","state":"known","value":null,"id":1,"version":0,"since":0.0,"reason":null,"quarantined":null,"drain":null,"faults":[]}','h1');
INSERT INTO "hosts" VALUES(2,0,'known',1,'{"name":"h2","source":"h2","state":"known","value":null,"id":2,"version":0,"since":0.0,"reason":null,"quarantined":null,"drain":null,"faults":[]}','h2');
INSERT INTO "hosts" VALUES(3,0,'fenced',1,'{"name":"h3","source":"h3","state":"fenced","value":null,"id":3,"version":0,"since":0.0,"reason":null,"quarantined":null,"drain":null,"faults":[]}','h3');
INSERT INTO "hosts" VALUES(4,0,'known',1,'{"name":"h4","source":"h4","state":"known","value":null,"id":4,"version":0,"since":0.0,"reason":null,"quarantined":null,"drain":null,"faults":[]}','h4');
CREATE TABLE job_usage (
	attempt INTEGER NOT NULL, 
	wall FLOAT NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (attempt)
);
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
CREATE TABLE leases (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE meta (
	"key" VARCHAR NOT NULL, 
	value VARCHAR NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('site','test0');
INSERT INTO "meta" VALUES('next_serial','20000');
INSERT INTO "meta" VALUES('next_attempt','20000');
INSERT INTO "meta" VALUES('next_template','6');
INSERT INTO "meta" VALUES('since','1700000000.0');
INSERT INTO "meta" VALUES('epoch','0');
INSERT INTO "meta" VALUES('next_lease','20000');
INSERT INTO "meta" VALUES('next_saved','1');
INSERT INTO "meta" VALUES('boot','boot-1');
INSERT INTO "meta" VALUES('used','1700001000.0');
CREATE TABLE offers (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "offers" VALUES(5,1,'taken',1,'{"id": 5, "version": 1, "state": "taken", "since": 980.5, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(6,1,'closed',1,'{"id": 6, "version": 1, "state": "closed", "since": 970.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(9,1,'open',1,'{"id": 9, "version": 1, "state": "open", "since": 981.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(10,1,'closing',1,'{"id": 10, "version": 1, "state": "closing", "since": 982.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(11,1,'closed',1,'{"id": 11, "version": 1, "state": "closed", "since": 983.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(12,1,'closing',1,'{"id": 12, "version": 1, "state": "closing", "since": 984.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(14,1,'taken',1,'{"id": 14, "version": 1, "state": "taken", "since": 985.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(16,1,'open',1,'{"id": 16, "version": 1, "state": "open", "since": 986.0, "reason": null, "quarantined": null, "uid": null}');
INSERT INTO "offers" VALUES(22,1,'open',1,'{"id": 22, "version": 1, "state": "open", "since": 987.0, "reason": null, "quarantined": null, "uid": null}');
CREATE TABLE reserve (
	id INTEGER NOT NULL, 
	room BLOB NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE saved (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE templates (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "templates" VALUES(1,1,'ready',1,'{"id": 1, "version": 1, "state": "ready", "since": 900.0, "host": "h1", "image": "slim", "size": {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, "reason": null, "tries": 0, "quarantined": null, "account": "", "source": "h1", "build": ""}');
INSERT INTO "templates" VALUES(2,1,'building',1,'{"id": 2, "version": 1, "state": "building", "since": 900.0, "host": "h2", "image": "slim", "size": {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, "reason": null, "tries": 0, "quarantined": null, "account": "physics", "source": "h2", "build": ""}');
INSERT INTO "templates" VALUES(3,1,'broken',1,'{"id": 3, "version": 1, "state": "broken", "since": 900.0, "host": "h1", "image": "warm", "size": {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, "reason": {"kind": "said", "figures": [["text", "it does not boot"]]}, "tries": 2, "quarantined": null, "account": "", "source": "h1", "build": ""}');
INSERT INTO "templates" VALUES(4,1,'retiring',1,'{"id": 4, "version": 1, "state": "retiring", "since": 900.0, "host": "h1", "image": "old", "size": {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, "reason": null, "tries": 0, "quarantined": null, "account": "", "source": "h1", "build": ""}');
INSERT INTO "templates" VALUES(5,1,'absent',0,'{"id": 5, "version": 1, "state": "absent", "since": 900.0, "host": "h1", "image": "older", "size": {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, "reason": null, "tries": 0, "quarantined": null, "account": "", "source": "h1", "build": ""}');
CREATE TABLE utilization (
	kind VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	span INTEGER NOT NULL, 
	wall INTEGER NOT NULL, 
	covered FLOAT NOT NULL, 
	cpus_peak FLOAT NOT NULL, 
	memory_peak FLOAT NOT NULL, 
	cpus FLOAT NOT NULL, 
	memory FLOAT NOT NULL, 
	received FLOAT NOT NULL, 
	sent FLOAT NOT NULL, 
	read FLOAT NOT NULL, 
	written FLOAT NOT NULL, 
	active FLOAT, 
	cpu_pressure FLOAT, 
	memory_pressure FLOAT, 
	io_pressure FLOAT, 
	PRIMARY KEY (kind, name, span, wall)
)
 WITHOUT ROWID

;
CREATE TABLE vms (
	id INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	live BOOLEAN NOT NULL, 
	body VARCHAR NOT NULL, 
	attempt INTEGER, 
	PRIMARY KEY (id)
);
INSERT INTO "vms" VALUES(1,2,'planned',1,'{"id": 1, "version": 2, "state": "planned", "since": 951.0, "name": "mvtest0-1", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:01", "address": "10.9.1.1/16", "attempt": 4, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',4);
INSERT INTO "vms" VALUES(2,3,'parked',1,'{"id": 2, "version": 3, "state": "parked", "since": 952.0, "name": "mvtest0-2", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:02", "address": "10.9.1.2/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "parked", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(3,4,'starting',1,'{"id": 3, "version": 4, "state": "starting", "since": 953.0, "name": "mvtest0-3", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:03", "address": "10.9.1.3/16", "attempt": 5, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',5);
INSERT INTO "vms" VALUES(4,1,'joined',1,'{"id": 4, "version": 1, "state": "joined", "since": 954.0, "name": "mvtest0-4", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:04", "address": "10.9.1.4/16", "attempt": 6, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',6);
INSERT INTO "vms" VALUES(5,2,'joined',1,'{"id": 5, "version": 2, "state": "joined", "since": 955.0, "name": "mvtest0-5", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:05", "address": "10.9.1.5/16", "attempt": 7, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',7);
INSERT INTO "vms" VALUES(6,3,'serving',1,'{"id": 6, "version": 3, "state": "serving", "since": 956.0, "name": "mvtest0-6", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:06", "address": "10.9.1.6/16", "attempt": 8, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',8);
INSERT INTO "vms" VALUES(7,4,'dead',1,'{"id": 7, "version": 4, "state": "dead", "since": 957.0, "name": "mvtest0-7", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:07", "address": "10.9.1.7/16", "attempt": 11, "reason": {"kind": "said", "figures": [["text", "its QEMU has ended"]]}, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',11);
INSERT INTO "vms" VALUES(8,1,'dead',1,'{"id": 8, "version": 1, "state": "dead", "since": 958.0, "name": "mvtest0-8", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:08", "address": "10.9.1.8/16", "attempt": 15, "reason": {"kind": "said", "figures": [["text", "its QEMU has ended"]]}, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',15);
INSERT INTO "vms" VALUES(9,2,'joined',1,'{"id": 9, "version": 2, "state": "joined", "since": 959.0, "name": "mvtest0-9", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:09", "address": "10.9.1.9/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(10,3,'retiring',1,'{"id": 10, "version": 3, "state": "retiring", "since": 960.0, "name": "mvtest0-10", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:0a", "address": "10.9.1.10/16", "attempt": null, "reason": {"kind": "said", "figures": [["text", "it is older than 3600 s"]]}, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(11,4,'joined',1,'{"id": 11, "version": 4, "state": "joined", "since": 961.0, "name": "mvtest0-11", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:0b", "address": "10.9.1.11/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(12,1,'joined',1,'{"id": 12, "version": 1, "state": "joined", "since": 962.0, "name": "mvtest0-12", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:0c", "address": "10.9.1.12/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(13,2,'joined',1,'{"id": 13, "version": 2, "state": "joined", "since": 963.0, "name": "mvtest0-13", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:0d", "address": "10.9.1.13/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(14,3,'joined',1,'{"id": 14, "version": 3, "state": "joined", "since": 964.0, "name": "mvtest0-14", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:0e", "address": "10.9.1.14/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(15,4,'lost',1,'{"id": 15, "version": 4, "state": "lost", "since": 965.0, "name": "mvtest0-15", "places": [{"host": "h2", "source": "h2", "template": ["h2", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:0f", "address": "10.9.1.15/16", "attempt": 8, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',8);
INSERT INTO "vms" VALUES(16,1,'lost',1,'{"id": 16, "version": 1, "state": "lost", "since": 966.0, "name": "mvtest0-16", "places": [{"host": "h2", "source": "h2", "template": ["h2", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:10", "address": "10.9.1.16/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(17,2,'releasing',1,'{"id": 17, "version": 2, "state": "releasing", "since": 967.0, "name": "mvtest0-17", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:11", "address": "10.9.1.17/16", "attempt": 9, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',9);
INSERT INTO "vms" VALUES(18,3,'ending',1,'{"id": 18, "version": 3, "state": "ending", "since": 968.0, "name": "mvtest0-18", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:12", "address": "10.9.1.18/16", "attempt": 9, "reason": {"kind": "said", "figures": [["text", "the VM died"]]}, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',9);
INSERT INTO "vms" VALUES(19,4,'removing',1,'{"id": 19, "version": 4, "state": "removing", "since": 969.0, "name": "mvtest0-19", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:13", "address": "10.9.1.19/16", "attempt": 10, "reason": {"kind": "said", "figures": [["text", "no luck"]]}, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',10);
INSERT INTO "vms" VALUES(20,1,'ending',1,'{"id": 20, "version": 1, "state": "ending", "since": 970.0, "name": "mvtest0-20", "places": [{"host": "h3", "source": "h3", "template": ["h3", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:14", "address": "10.9.1.20/16", "attempt": 12, "reason": {"kind": "said", "figures": [["text", "an operator says that host h3 is off"]]}, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',12);
INSERT INTO "vms" VALUES(21,2,'removing',1,'{"id": 21, "version": 2, "state": "removing", "since": 971.0, "name": "mvtest0-21", "places": [{"host": "h3", "source": "h3", "template": ["h3", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:15", "address": "10.9.1.21/16", "attempt": null, "reason": {"kind": "said", "figures": [["text", "an operator says that host h3 is off"]]}, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(22,3,'joined',1,'{"id": 22, "version": 3, "state": "joined", "since": 972.0, "name": "mvtest0-22", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:16", "address": "10.9.1.22/16", "attempt": null, "reason": null, "quarantined": {"kind": "said", "figures": [["text", "a fault of Multiverse"]]}, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(23,4,'gone',0,'{"id": 23, "version": 4, "state": "gone", "since": 973.0, "name": "mvtest0-23", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:17", "address": "10.9.1.23/16", "attempt": 16, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',16);
INSERT INTO "vms" VALUES(24,1,'gone',0,'{"id": 24, "version": 1, "state": "gone", "since": 974.0, "name": "mvtest0-24", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:18", "address": "10.9.1.24/16", "attempt": 17, "reason": null, "quarantined": null, "account": "", "pool": "joined", "token": "", "job_id": "", "fault": ""}',17);
INSERT INTO "vms" VALUES(25,2,'serving',1,'{"id": 25, "version": 2, "state": "serving", "since": 975.0, "name": "mvtest0-25", "places": [{"host": "h1", "source": "h1", "template": null, "template_id": null}], "image": "slim", "kind": "full", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:19", "address": "10.9.1.25/16", "attempt": 15, "reason": null, "quarantined": null, "account": "physics", "pool": null, "token": "", "job_id": "", "fault": ""}',15);
INSERT INTO "vms" VALUES(26,3,'ending',1,'{"id": 26, "version": 3, "state": "ending", "since": 976.0, "name": "mvtest0-26", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:1a", "address": "10.9.1.26/16", "attempt": null, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',NULL);
INSERT INTO "vms" VALUES(27,4,'starting',1,'{"id": 27, "version": 4, "state": "starting", "since": 977.0, "name": "mvtest0-27", "places": [{"host": "h1", "source": "h1", "template": ["h1", "slim", {"cpus": 1, "memory": 256, "disk": 0, "net": 0}, ""], "template_id": 1}], "image": "slim", "kind": "instant", "size": {"cpus": 1, "memory": 384, "disk": 0, "net": 0}, "node_size": {"cpus": 1, "memory": 300, "disk": 0, "net": 0}, "mac": "02:00:00:00:00:1b", "address": "10.9.1.27/16", "attempt": 13, "reason": null, "quarantined": null, "account": "", "pool": null, "token": "", "job_id": "", "fault": ""}',13);
CREATE INDEX ix_attempts_live ON attempts (id) WHERE live = 1;
CREATE INDEX ix_attempts_job_id ON attempts (job_id);
CREATE INDEX ix_vms_attempt ON vms (attempt);
CREATE INDEX ix_vms_live ON vms (id) WHERE live = 1;
CREATE INDEX ix_templates_live ON templates (id) WHERE live = 1;
CREATE INDEX ix_journal_attempt ON journal (attempt);
CREATE INDEX ix_offers_live ON offers (id) WHERE live = 1;
CREATE INDEX ix_ended_wall ON ended (kind, wall);
CREATE INDEX ix_attempts_live_job ON attempts (job_id) WHERE live = 1;
CREATE INDEX ix_journal_row ON journal (kind, id);
CREATE INDEX ix_hosts_live ON hosts (id) WHERE live = 1;
CREATE UNIQUE INDEX ix_hosts_name ON hosts (name);
CREATE INDEX ix_utilization_age ON utilization (span, wall);
CREATE INDEX ix_job_usage_wall ON job_usage (wall);
CREATE INDEX ix_leases_live ON leases (id) WHERE live = 1;
CREATE INDEX ix_saved_live ON saved (id) WHERE live = 1;
COMMIT;
