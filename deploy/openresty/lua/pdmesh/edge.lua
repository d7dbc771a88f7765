-- What nginx calls: rules on the way in, headers and errors on the way out.

local engine = require("pdmesh.engine")
local errors = require("pdmesh.errors")
local headers = require("pdmesh.headers")
local scanner = require("pdmesh.scanner")

local ngx = ngx

local M = {}

local ACTIONS_HEADER = "x-pdmesh-param-actions"
local SANE_ID = "^[\33-\126]+$"
local NUM_LOGGED_BYTES = 200

-- nginx makes these anew for the upstream (nginx.conf for the first) and needs the client's.
local NGINX_OWN = {
    ["accept-encoding"] = true, host = true, connection = true, ["content-length"] = true, ["transfer-encoding"] = true,
    te = true, ["keep-alive"] = true, expect = true, upgrade = true,
}

local rules

-- In init_by_lua: read the compiled rules. A file that is missing or invalid stops nginx from
-- starting, or keeps the old rules when it reloads.
function M.load(path)
    rules = engine.prepare(dofile(path))
end

-- The client's id, or nginx's own.
local function request_id()
    local given = ngx.var.http_x_request_id
    if given and #given <= 128 and given:find(SANE_ID) then
        return given
    end
    return ngx.var.request_id
end

local function answer(status, body)
    ngx.status = status
    ngx.header.content_type = "application/json"
    ngx.header.content_length = #body
    ngx.print(body)
    return ngx.exit(ngx.HTTP_OK)
end

local function refuse(status, message, param, code)
    return answer(status, errors.refusal(status, message, param, code))
end

-- The whole body, from memory or from the file that nginx spilled it to.
local function read_body()
    ngx.req.read_body()
    local body = ngx.req.get_body_data()
    if body then
        return body
    end
    local path = ngx.req.get_body_file()
    if not path then
        return ""
    end
    local file = assert(io.open(path, "rb"))
    body = file:read("*a")
    file:close()
    return body
end

-- Why the body cannot be JSON, by its headers; nil when it can.
local function media_problem(given)
    local encoding = (given["content-encoding"] or {})[1]
    if encoding and encoding:lower() ~= "identity" then
        return "compressed bodies are not supported"
    end
    local media_type = (given["content-type"] or {})[1]
    if not media_type then
        return nil
    end
    media_type = media_type:lower():match("^%s*(.*)$")
    if not (media_type:find("^application/json") or media_type:find("^application/[%w_.+-]+%+json"))
    then
        return "the Content-Type should be application/json"
    end
    local charset = media_type:match(';%s*charset%s*=%s*"?([^%s;"]+)')
    if charset and charset ~= "utf-8" and charset ~= "utf8" then
        return "the body should be UTF-8"
    end
    return nil
end

local function has_rules_for_body(method, body)
    return body ~= "" or method == "POST" or method == "PUT" or method == "PATCH"
end

-- In access_by_lua: apply the rules to the request.
function M.access()
    local given = headers.index(ngx.req.get_headers(0))
    local body = read_body()
    if not has_rules_for_body(ngx.req.get_method(), body) then
        body = nil
    end
    if body then
        local problem = media_problem(given)
        if problem then
            return refuse(415, problem, nil, "unsupported_media_type")
        end
        problem = scanner.find_problem(body)
        if problem then
            return refuse(400, problem)
        end
    end
    local outcome = engine.apply(rules, {
        body = body,
        route = ngx.var.uri,
        headers = given,
        key = ngx.var.pdmesh_key ~= "" and ngx.var.pdmesh_key or nil,
        key_group = ngx.var.pdmesh_key_group ~= "" and ngx.var.pdmesh_key_group or nil,
    })
    ngx.ctx.actions = engine.actions_header(outcome.actions)
    local rejection = outcome.rejection
    if rejection then
        return refuse(rejection.status, rejection.message, rejection.param, rejection.code)
    end
    if body and outcome.body ~= body then
        ngx.req.set_body_data(outcome.body)
    end
    for _, name in ipairs(outcome.strip) do
        if not NGINX_OWN[name] then
            ngx.req.clear_header(name)
        end
    end
    -- Names with an underscore never pass, even where nginx is told to accept them.
    for name in pairs(ngx.req.get_headers(0, true)) do
        if name:find("_", 1, true) then
            ngx.req.clear_header(name)
        end
    end
    for _, header in ipairs(outcome.set) do
        ngx.req.set_header(header.name, header.value)
    end
    ngx.req.set_header("x-request-id", request_id())
end

-- An answer that no client of the API can read: HTML, or nothing where something is due.
local function is_foreign()
    if not ngx.var.upstream_status or ngx.req.get_method() == "HEAD" then
        return false
    end
    local media_type = ngx.header.content_type
    if media_type and media_type:lower():find("^text/html") then
        return true
    end
    return ngx.status == 200 and tonumber(ngx.header.content_length) == 0
end

local function replace_foreign()
    ngx.ctx.foreign_status = ngx.status
    ngx.ctx.replacement = errors.own(502)
    ngx.status = 502
    ngx.header.content_type = "application/json"
    ngx.header.content_length = #ngx.ctx.replacement
    ngx.header.content_encoding = nil
    ngx.header.etag = nil
    ngx.header.last_modified = nil
end

-- In header_filter_by_lua: what the client is told besides the upstream's words.
function M.header_filter()
    if is_foreign() then
        replace_foreign()
    end
    local actions, later = ngx.ctx.actions, ngx.header[ACTIONS_HEADER]
    if actions and later then
        actions = actions .. ", " .. (type(later) == "table" and table.concat(later, ", ") or later)
    end
    if actions then
        ngx.header[ACTIONS_HEADER] = actions
    end
    if not ngx.header["x-request-id"] then
        ngx.header["x-request-id"] = request_id()
    end
    ngx.header["set-cookie"] = nil
    local media_type = ngx.header.content_type
    if media_type and media_type:find("^text/event%-stream") then
        ngx.header["x-accel-buffering"] = "no"
        ngx.header["cache-control"] = "no-cache, no-transform"
    end
end

-- In body_filter_by_lua: put the replacement in place of a foreign answer.
function M.body_filter()
    local replacement = ngx.ctx.replacement
    if not replacement then
        return
    end
    if not ngx.ctx.is_replaced then
        ngx.ctx.is_replaced = true
        ngx.log(
            ngx.ERR, "the upstream answered with status ", ngx.ctx.foreign_status,
            " and no JSON: ", (ngx.arg[1] or ""):sub(1, NUM_LOGGED_BYTES)
        )
        ngx.arg[1] = replacement
    else
        ngx.arg[1] = ""
    end
end

-- The content of the error location: whatever nginx refuses, in OpenAI's form.
function M.error_page()
    local body = errors.own(ngx.status)
    ngx.header.content_type = "application/json"
    ngx.header.content_length = #body
    ngx.print(body)
end

return M
