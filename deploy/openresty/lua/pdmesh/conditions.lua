-- When a rule applies: tests of the request as the client sent it.
-- gateway/rules/conditions.py and paths.py are this file in Python.

local scanner = require("pdmesh.scanner")

local byte, sub, find, format = string.byte, string.sub, string.find, string.format
local skip_space = scanner.skip_space

local M = {}

-- `*` stands for any text, also none; everything else for itself.
local function glob_matches(glob, text)
    local parts = glob.parts
    local count = #parts
    if count == 1 then
        return text == parts[1]
    end
    local first, last = parts[1], parts[count]
    local limit = #text - #last
    if limit < #first or sub(text, 1, #first) ~= first or sub(text, limit + 1) ~= last then
        return false
    end
    local at = #first + 1
    for i = 2, count - 1 do
        local from, to = find(text, parts[i], at, true)
        if not from or to > limit then
            return false
        end
        at = to + 1
    end
    return true
end
M.glob_matches = glob_matches

local function any_matches(globs, text)
    for _, glob in ipairs(globs) do
        if glob_matches(glob, text) then
            return true
        end
    end
    return false
end
M.any_matches = any_matches

local TYPES = {
    [34] = "string", [123] = "object", [91] = "array", [116] = "boolean", [102] = "boolean",
    [110] = "null",
}

local function type_at(text, at)
    return TYPES[byte(text, at)] or "number"
end

-- Calls visit(position of key, position behind it, position of value) for each member;
-- stops when it returns true.
local function each_member(text, at, visit)
    at = skip_space(text, at + 1)
    while byte(text, at) ~= 125 do
        local key_end = scanner.skip_string(text, at)
        local value_at = skip_space(text, skip_space(text, key_end) + 1)
        if visit(at, key_end, value_at) then
            return
        end
        at = skip_space(text, scanner.skip_value(text, value_at))
        if byte(text, at) == 44 then
            at = skip_space(text, at + 1)
        end
    end
end

-- Calls visit(position of element, its number from 0); stops when it returns true.
local function each_element(text, at, visit)
    local number = 0
    at = skip_space(text, at + 1)
    while byte(text, at) ~= 93 do
        if visit(at, number) then
            return
        end
        number = number + 1
        at = skip_space(text, scanner.skip_value(text, at))
        if byte(text, at) == 44 then
            at = skip_space(text, at + 1)
        end
    end
end

-- The position of the value of `key` in the object at `at`, or nil.
local function member_at(text, at, key)
    local found
    each_member(text, at, function(key_at, key_end, value_at)
        if scanner.decode_string(sub(text, key_at, key_end - 1)) == key then
            found = value_at
            return true
        end
    end)
    return found
end

local function any_value_at(text, at, steps, position, passes)
    local step = steps[position]
    if step == nil then
        return passes(text, at)
    end
    local kind = type_at(text, at)
    if type(step) == "string" then
        local value_at = kind == "object" and member_at(text, at, step)
        return value_at and any_value_at(text, value_at, steps, position + 1, passes) or false
    end
    local passed = false
    if kind == "array" then
        each_element(text, at, function(element_at, number)
            if step == true or step == number then
                passed = any_value_at(text, element_at, steps, position + 1, passes)
                return passed or step == number
            end
        end)
    end
    return passed
end

local function number_at(text, at)
    return tonumber(sub(text, at, scanner.skip_value(text, at) - 1))
end

local function string_at(text, at)
    return scanner.decode_string(sub(text, at, scanner.skip_string(text, at) - 1))
end

local function canonical_string(text)
    -- Python counts bytes too.
    return #text .. ":" .. text
end

-- One text for all spellings of a JSON value; numbers are compared as doubles.
local function canonical(text, at)
    local kind = type_at(text, at)
    if kind == "string" then
        return canonical_string(string_at(text, at))
    elseif kind == "number" then
        -- -0 equals 0.
        return format("%.17g", number_at(text, at) + 0.0)
    elseif kind == "array" then
        local parts = {}
        each_element(text, at, function(element_at)
            parts[#parts + 1] = canonical(text, element_at)
        end)
        return "[" .. table.concat(parts, ",") .. "]"
    elseif kind == "object" then
        local items = {}
        each_member(text, at, function(key_at, _, value_at)
            items[#items + 1] =
                { canonical_string(string_at(text, key_at)), canonical(text, value_at) }
        end)
        table.sort(items, function(one, other) return one[1] < other[1] end)
        for position, item in ipairs(items) do
            items[position] = item[1] .. "=" .. item[2]
        end
        return "{" .. table.concat(items, ",") .. "}"
    end
    return sub(text, at, scanner.skip_value(text, at) - 1)
end

local function test_passes(test, text, at)
    local kind = type_at(text, at)
    if test.type and kind ~= test.type then
        return false
    end
    if test.one_of then
        local value, found = canonical(text, at), false
        for _, one in ipairs(test.one_of) do
            found = found or one == value
        end
        if not found then
            return false
        end
    end
    if test.like and not (kind == "string" and any_matches(test.like, string_at(text, at))) then
        return false
    end
    if test.gt or test.gte or test.lt or test.lte then
        if kind ~= "number" then
            return false
        end
        local number = number_at(text, at)
        return (not test.gt or number > test.gt) and (not test.gte or number >= test.gte)
            and (not test.lt or number < test.lt) and (not test.lte or number <= test.lte)
    end
    return true
end

-- Whether the predicate holds for the body, which must be a valid object.
local function holds(predicate, body, aliases)
    if predicate.op then
        local all = predicate.op == "all"
        for _, one in ipairs(predicate.of) do
            if holds(one, body, aliases) ~= all then
                return predicate.op == "any"
            end
        end
        return predicate.op ~= "any"
    end
    local steps = predicate.path.steps
    local first = steps[1]
    local root = skip_space(body, 1)
    local passed = false
    for _, name in ipairs(aliases[first] or { first }) do
        local own = { name, unpack(steps, 2) }
        passed = passed or any_value_at(body, root, own, 1, function(text, at)
            return test_passes(predicate, text, at)
        end)
    end
    if predicate.exists == false then
        return not passed
    end
    return passed
end
M.body_holds = holds

local function header_holds(test, headers)
    local values = headers[test.name] or {}
    if not test.globs then
        return (#values > 0) == test.present
    end
    for _, value in ipairs(values) do
        if any_matches(test.globs, value) then
            return true
        end
    end
    return false
end

local FACTS = { "route", "model", "served_model", "key", "key_group" }

-- Whether all of `when` holds for the facts of a request.
function M.when_holds(when, facts, aliases)
    for _, name in ipairs(FACTS) do
        if when[name] and not (facts[name] and any_matches(when[name], facts[name])) then
            return false
        end
    end
    for _, test in ipairs(when.headers) do
        if not header_holds(test, facts.headers) then
            return false
        end
    end
    return not when.body or holds(when.body, facts.body, aliases)
end

-- The model that the client named, or nil.
function M.model_of(body)
    local at = member_at(body, skip_space(body, 1), "model")
    if at and type_at(body, at) == "string" then
        return string_at(body, at)
    end
    return nil
end

return M
