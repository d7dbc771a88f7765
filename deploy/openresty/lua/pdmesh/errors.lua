-- Errors in OpenAI's form.

local M = {}

local ESCAPES = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

local function encode(text)
    if not text then
        return "null"
    end
    return '"' .. text:gsub('[%z\1-\31"\\]', function(c)
        return ESCAPES[c] or string.format("\\u%04x", c:byte())
    end) .. '"'
end

local INVALID = "invalid_request_error"
-- What nginx itself answers: message, type, code.
local OWN = {
    [400] = { "the request is not valid HTTP", INVALID },
    [403] = { "this request is not allowed", INVALID },
    [404] = { "There is nothing at this URL.", INVALID, "unknown_url" },
    [405] = { "This URL does not take this method.", INVALID, "method_not_allowed" },
    [408] = { "the request did not arrive in time", INVALID },
    [413] = { "the body is too large", INVALID, "request_too_large" },
    [414] = { "the URL is too long", INVALID },
    [431] = { "the head of the request is too large", INVALID },
    [502] = { "The server behind this one did not answer properly.", "server_error" },
    [503] = {
        "No server can take this request at the moment. Please try again.",
        "service_unavailable_error",
    },
    [504] = { "The server behind this one did not answer in time.", "server_error", "timeout" },
}
local INTERNAL = { "The server had an error while processing this request.", "server_error" }

function M.envelope(message, type, param, code)
    return '{"error":{"message":' .. encode(message) .. ',"type":' .. encode(type)
        .. ',"param":' .. encode(param) .. ',"code":' .. encode(code) .. "}}"
end

-- The body for an error that nginx made.
function M.own(status)
    local row = OWN[status] or (status < 500 and OWN[400]) or INTERNAL
    return M.envelope(row[1], row[2], nil, row[3])
end

-- The body for a refusal by a rule or a check.
function M.refusal(status, message, param, code)
    return M.envelope(message, status == 429 and "rate_limit_error" or INVALID, param, code)
end

return M
