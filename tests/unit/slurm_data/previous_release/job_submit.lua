-- A site with a job_submit.lua of its own keeps it: this part, as far as the two functions, goes to its head, and each of
-- its own two functions ends with the call that is in these.
local _, multiverse = pcall(dofile, "/etc/slurm/multiverse.lua")
if type(multiverse) ~= "table" then
  -- Without it nobody would send jobs to the gate: those of its partitions are refused, all others go on as they are.
  slurm.log_error("multiverse: %s", tostring(multiverse))
  local ours = { ["vm"] = true, ["vmrun"] = true }
  local administrators = { [0] = true, [64] = true, }

  local function answer(names)
    for name in string.gmatch(names, "[^,]+") do
      if ours[name] then
        slurm.log_user("%s", "Multiverse cannot look at this job, so it is refused: tell an administrator, whom slurmctld's log tells why")
        return slurm.ERROR
      end
    end
    return slurm.SUCCESS
  end

  multiverse = {}

  function multiverse.submit(job, partitions, uid)
    for name, partition in pairs(partitions or {}) do
      if not job.partition and partition.flag_default == 1 then return answer(name) end
    end
    return answer(job.partition or "")
  end

  function multiverse.modify(job, record, partitions, uid)
    if administrators[uid] then return slurm.SUCCESS end
    return answer((record.partition or "") .. "," .. (job.partition or ""))
  end
end

function slurm_job_submit(job, partitions, uid)
  return multiverse.submit(job, partitions, uid)
end

function slurm_job_modify(job, record, partitions, uid)
  return multiverse.modify(job, record, partitions, uid)
end

return slurm.SUCCESS
