-- A site with a job_submit.lua of its own keeps it: load multiverse.lua there as here, and end each of its two
-- functions with the call that is in these.
local loaded, multiverse = pcall(dofile, "{{ directory }}/multiverse.lua")
if not loaded then
  slurm.log_error("multiverse: %s", tostring(multiverse))
  multiverse = nil
end

function slurm_job_submit(job, partitions, uid)
  return multiverse and multiverse.submit(job, partitions, uid) or slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return multiverse and multiverse.modify(job, record, partitions, uid) or slurm.SUCCESS
end

return slurm.SUCCESS
