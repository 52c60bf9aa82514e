-- For a site that has no job_submit.lua. A site that has one adds the two lines of code below to the end of its own,
-- before the last "return": `multiverse site check` prints them.
function slurm_job_submit(job, partitions, uid)
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

{{ hook }}
return slurm.SUCCESS
