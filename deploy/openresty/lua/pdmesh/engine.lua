-- Applying rules to one request: bytes in, bytes out, and what was done.
-- gateway/rules/engine.py is this file in Python.

local conditions = require("pdmesh.conditions")
local Edits = require("pdmesh.edits")
local headers = require("pdmesh.headers")

local M = {}

local FORMAT = 1
local MAX_ACTIONS_BYTES = 1024

-- Rules for `apply`, from the table that `pdmesh rules compile` made.
function M.prepare(rules)
    if type(rules) ~= "table" or rules.format ~= FORMAT then
        error("the rules were compiled by another version: run `pdmesh rules compile` again", 0)
    end
    return { rules = rules.rules, aliases = rules.aliases, lists = headers.prepare(rules) }
end

-- The first matching rule that has a name for the client's model gives the new one.
local function rewrite_model(set, facts, edits)
    if not facts.model then
        return
    end
    for _, rule in ipairs(set.rules) do
        if #rule.rewrite_model > 0 and conditions.when_holds(rule.when, facts, set.aliases) then
            for _, rewrite in ipairs(rule.rewrite_model) do
                if conditions.glob_matches(rewrite.glob, facts.model) then
                    if rewrite.name ~= facts.model then
                        edits:rewrite_model(rule, rewrite)
                    end
                    facts.served_model = rewrite.name
                    return
                end
            end
        end
    end
end

local KINDS = { "rename", "drop", "default", "clamp", "force" }

local function edit(matched, edits)
    for _, kind in ipairs(KINDS) do
        for _, rule in ipairs(matched) do
            if kind == "default" then
                if #rule.default > 0 then
                    edits:default(rule, rule.default)
                end
            else
                for _, one in ipairs(rule[kind]) do
                    edits[kind](edits, rule, one)
                end
            end
        end
    end
end

local function reject(set, matched, body, edits)
    for _, rule in ipairs(matched) do
        local answer = rule.reject
        if answer
            and (not answer.condition
                or conditions.body_holds(answer.condition, body, set.aliases))
        then
            edits:record("reject", rule.name, rule)
            return answer
        end
    end
    return nil
end

-- `request`: body (valid JSON object) or nil when there is none to edit, route, headers
-- (indexed), key, key_group. Returns a table of body, strip, set, actions, rejection.
function M.apply(set, request)
    local body = request.body or "{}"
    local model = conditions.model_of(body)
    local facts = {
        route = request.route,
        model = model,
        served_model = model,
        body = body,
        headers = request.headers,
        key = request.key,
        key_group = request.key_group,
    }
    local edits = Edits.new(body, set.aliases)
    rewrite_model(set, facts, edits)
    local matched = {}
    for _, rule in ipairs(set.rules) do
        if conditions.when_holds(rule.when, facts, set.aliases) then
            matched[#matched + 1] = rule
        end
    end
    local outcome = {}
    if request.body then
        edit(matched, edits)
        outcome.body = edits:render()
        outcome.rejection = reject(set, matched, outcome.body, edits)
    end
    outcome.strip, outcome.set = headers.decide(
        set.lists, request.headers, matched,
        function(kind, name, rule) edits:record(kind, name, rule) end
    )
    outcome.actions = edits.actions
    return outcome
end

-- The value of x-pdmesh-param-actions: bounded, and safe in a header; nil without actions.
function M.actions_header(actions)
    if #actions == 0 then
        return nil
    end
    local parts, room = {}, MAX_ACTIONS_BYTES
    for position, action in ipairs(actions) do
        local text = (action.kind .. ":" .. action.path):gsub("[^%w_.:/>%[%]-]", function(c)
            return string.format("%%%02X", c:byte())
        end)
        room = room - #text - 2
        if room < 0 then
            parts[#parts + 1] = "+" .. (#actions - position + 1)
            break
        end
        parts[#parts + 1] = text
    end
    return table.concat(parts, ", ")
end

return M
