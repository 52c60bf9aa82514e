-- A site that has a job_submit.lua already copies the part above the two functions to the head of its own file, and ends
-- its own two functions with the calls below.
local _, multiverse = pcall(dofile, "{{ directory }}/multiverse.lua")
if type(multiverse) ~= "table" then
  -- Without multiverse.lua no job is sent to the gate. Jobs of Multiverse's partitions are refused, all others accepted.
  slurm.log_error("multiverse: %s", tostring(multiverse))
  local ours = { ["{{ gate_partition }}"] = true, ["{{ run_partition }}"] = true }
  local administrators = { {% for uid in administrators %}[{{ uid }}] = true, {% endfor %}}

  local function answer(names)
    for name in string.gmatch(names, "[^,]+") do
      if ours[name] then
        slurm.log_user("%s", "{{ failed }}")
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
