-- Multiverse's part of job_submit.lua: sends jobs to the gate and refuses what cannot be served.
-- slurmctld holds its locks while this runs, so it reads and writes nothing but one empty file.

local multiverse = {}
local site = dofile("{{ directory }}/multiverse_site.lua")

local NO_VAL, NO_VAL16 = 4294967294, 65534

local function number(value, unset)
  if type(value) ~= "number" or value == unset or value >= NO_VAL - 1 then return nil end
  return value
end

local function ceil_div(a, b) return math.floor((a + b - 1) / b) end

local function words(text, separators)
  local found = {}
  for word in string.gmatch(text or "", "[^" .. separators .. "]+") do found[#found + 1] = word end
  return found
end

local function default_partition(partitions)
  for name, partition in pairs(partitions or {}) do
    if partition.flag_default == 1 then return name end
  end
  return nil
end

local function ours(name) return name == site.gate_partition or name == site.run_partition end

local function any_ours(text)
  for _, name in ipairs(words(text, ",")) do
    if ours(name) then return true end
  end
  return false
end

-- What is wrong with a job's wishes about features and nodes, or nil.
local function wrong_wishes(job)
  local features = job.features or ""
  for _, word in ipairs(words(features, "&,|%[%]%(%)%s")) do
    if string.sub(word, 1, 3) == "mv_" or word == site.gate_feature then
      return "the constraint " .. word .. " is Multiverse's own: submit without it"
    end
  end
  if string.find(features, "[|%[%]%(%)%*!]") then
    return "alternatives and counts in --constraint are not served: join features with &"
  end
  if (job.prefer or "") ~= "" then return "--prefer is not served: ask with --constraint" end
  if (job.req_nodes or "") ~= "" then return "nodes are made for each job: submit without --nodelist" end
  if string.find("," .. (job.exc_nodes or ""), ",mv") then
    return "nodes are made for each job: submit without --exclude"
  end
  if (job.reservation or "") ~= "" then return "reservations are not served: submit without --reservation" end
  return nil
end

-- What is too large about a job, with what would fit, or nil.
local function too_large(job)
  local nodes = math.max(number(job.min_nodes, NO_VAL) or 1, 1)
  local per_task = math.max(number(job.cpus_per_task, NO_VAL16) or 1, 1)
  local tasks = number(job.num_tasks, NO_VAL) or 1
  local tasks_here = math.max(number(job.ntasks_per_node, NO_VAL16) or 0, ceil_div(tasks, nodes))
  local cpus = math.max(tasks_here * per_task, number(job.pn_min_cpus, NO_VAL16) or 1,
                        ceil_div(number(job.min_cpus, NO_VAL) or 1, nodes))
  local memory = number(job.min_mem_per_node, nil)
  local per_cpu = number(job.min_mem_per_cpu, nil) or site.memory_per_cpu
  if not memory or memory == 0 then memory = per_cpu * cpus end
  if cpus <= site.max_cpus and memory <= site.max_memory then
    if nodes * cpus <= site.total_cpus and nodes * (memory + site.reserve) <= site.total_memory then return nil end
    return string.format("the job asks for %d nodes of %d CPUs and %d MiB; all hosts together have %d CPUs and"
      .. " %d MiB, of which each VM needs %d MiB for itself: ask for fewer or smaller nodes",
      nodes, cpus, memory, site.total_cpus, site.total_memory, site.reserve)
  end
  return string.format("the job asks for %d CPUs and %d MiB on one node; the largest VM for a job here has"
    .. " %d CPUs and %d MiB: ask for less per node, or spread the job over more nodes with -N",
    cpus, memory, site.max_cpus, site.max_memory)
end

local function refuse(sentence)
  slurm.log_user("%s", sentence)
  return slurm.ERROR
end

-- An empty file with a fixed name: however many jobs come while nobody looks, it stays one file.
local function hint()
  local file = io.open(site.inbox .. "/submit", "w")
  if file then file:close() end
end

local function submit(job, partitions, uid)
  local partition = job.partition or default_partition(partitions)
  if not partition or not any_ours(partition) then return slurm.SUCCESS end
  if #words(partition, ",") > 1 then
    return refuse("several partitions are not served: name " .. site.gate_partition .. " alone")
  end
  if partition == site.run_partition then
    return refuse("submit to partition " .. site.gate_partition .. ": jobs are moved on from there by themselves")
  end
  if job.user_id == 0 then
    return refuse("Multiverse runs no job as root: submit as a user, e.g. sbatch --uid=NAME")
  end
  if number(job.het_job_offset, NO_VAL) then
    return refuse("heterogeneous jobs are not served: submit their parts as jobs of their own")
  end
  local sentence = wrong_wishes(job) or too_large(job)
  if sentence then return refuse(sentence) end
  if job.features and job.features ~= "" then
    job.features = job.features .. "&" .. site.gate_feature
  else
    job.features = site.gate_feature
  end
  hint()
  return slurm.SUCCESS
end

local function modify(job, record, partitions, uid)
  if site.administrators[uid] then return slurm.SUCCESS end
  local wanted = job.partition or ""
  if not ours(record.partition) then
    if any_ours(wanted) then return refuse("submit the job to partition " .. site.gate_partition .. " instead") end
    return slurm.SUCCESS
  end
  if wanted ~= "" and wanted ~= record.partition then
    return refuse("this job's partition is Multiverse's to change: cancel it and submit it anew")
  end
  if job.features or job.req_nodes then
    return refuse("a submitted job's constraint and nodes are fixed: cancel it and submit it anew")
  end
  local sentence = wrong_wishes(job) or too_large(job)
  if sentence then return refuse(sentence) end
  hint()
  return slurm.SUCCESS
end

-- An error of ours must not keep anybody's job from being submitted: it is logged, and the job goes on as it is.
local function guarded(what, ...)
  local fine, answer = pcall(what, ...)
  if fine then return answer end
  slurm.log_error("multiverse: %s", tostring(answer))
  return slurm.SUCCESS
end

function multiverse.submit(job, partitions, uid) return guarded(submit, job, partitions, uid) end
function multiverse.modify(job, record, partitions, uid) return guarded(modify, job, record, partitions, uid) end

return multiverse
