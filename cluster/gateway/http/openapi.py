"""The API's description, made from the request models, and a page that shows it without fetching anything else."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from cluster.gateway.http.chat import ChatRequest
from cluster.gateway.http.completions import CompletionRequest
from cluster.gateway.http.services import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]
_REF = "#/components/schemas/{model}"
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong, as a path."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OBJECT: Json = {"type": "object"}
_JSON_TYPE, _STREAM, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"


@cache
def document() -> Json:
    """Return the OpenAPI 3.1 document."""
    bodies = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "description": "OpenAI-compatible API of a Baton gateway."},
        "paths": {
            "/v1/chat/completions": {"post": _call("Answer a conversation", ChatRequest, _JSON_TYPE, _STREAM)},
            "/v1/completions": {"post": _call("Complete prompts", CompletionRequest, _JSON_TYPE, _STREAM)},
            "/v1/models": {"get": _call("The served model, as a list", None, _JSON_TYPE)},
            "/v1/models/{model}": {"get": _call("The served model", None, _JSON_TYPE) | {"parameters": [_MODEL]}},
            "/tokenize": {"post": _call("Text or conversation to token ids", TokenizeRequest, _JSON_TYPE)},
            "/detokenize": {"post": _call("Token ids to text", DetokenizeRequest, _JSON_TYPE)},
            "/health": {"get": _call("Whether the gateway lives", None, _JSON_TYPE)},
            "/ping": {"get": _call("The same, by another name", None, _JSON_TYPE)},
            "/is_sleeping": {"get": _call("Whether the model is put aside: never", None, _JSON_TYPE)},
            "/load": {"get": _call("How many requests run", None, _JSON_TYPE)},
            "/version": {"get": _call("Which version of Baton this is", None, _JSON_TYPE)},
            "/ready": {"get": _call("Whether a request could be placed", None, _JSON_TYPE)},
            "/metrics": {"get": _call("Metrics, in Prometheus' text format", None, _TEXT)},
            "/openapi.json": {"get": _call("This document", None, _JSON_TYPE)},
            "/docs": {"get": _call("This document, for people", None, _HTML)},
        },
        "components": {"schemas": {**schemas.get("$defs", {}), "Error": _ERROR}},
    }


_MODEL: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


def _call(summary: str, body: type | None, *content_types: str) -> Json:
    described: Json = {"summary": summary, "responses": {"200": {"description": "Success", "content": {}}}}
    for content_type in content_types:
        schema = _OBJECT if content_type == _JSON_TYPE else {"type": "string"}
        described["responses"]["200"]["content"][content_type] = {"schema": schema}
    error = {"description": "Failure", "content": {_JSON_TYPE: {"schema": {"$ref": _REF.format(model="Error")}}}}
    described["responses"]["default"] = error
    if body is not None:
        schema = {"$ref": _REF.format(model=body.__name__)}
        described["requestBody"] = {"required": True, "content": {_JSON_TYPE: {"schema": schema}}}
    return described


DOCS_PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Baton API</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code{background:#8882;padding:.1em .3em}td,th{text-align:left;vertical-align:top;padding:.2em .8em .2em 0}
summary{cursor:pointer;padding:.3em 0}</style>
<h1>Baton API</h1><p>OpenAI-compatible; the description for tools is <a href="openapi.json">openapi.json</a>.</p>
<main></main><script>
const el=(tag,text,...kids)=>{const e=document.createElement(tag);if(text)e.textContent=text;
e.append(...kids);return e};
fetch("openapi.json").then(r=>r.json()).then(doc=>{for(const[path,calls]of Object.entries(doc.paths))
for(const[method,call]of Object.entries(calls)){const d=el("details",""),s=el("summary","");
s.append(el("code",method.toUpperCase()+" "+path)," "+call.summary);d.append(s);
const body=call.requestBody;if(body){const name=body.content["application/json"].schema.$ref.split("/").pop();
const schema=doc.components.schemas[name],t=el("table","");
for(const[field,about]of Object.entries(schema.properties)){const row=el("tr","");
row.append(el("td","",el("code",field+((schema.required||[]).includes(field)?" *":""))),
el("td",about.description||""));t.append(row)}d.append(t)}
document.querySelector("main").append(d)}});
</script></html>
"""
