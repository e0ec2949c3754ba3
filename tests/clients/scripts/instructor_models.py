"""instructor: answers as pydantic models, by JSON schema and by a forced call, whole and in parts."""

from __future__ import annotations

import instructor
from openai import OpenAI
from plain import CHAIRLIFT, MODEL, SCRIPTED, same, script
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model would go on adding fields
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


MESSAGES = [{"role": "user", "content": "Extract: Jason is 25 years old."}]


def main() -> None:
    sdk = OpenAI(base_url=f"{CHAIRLIFT}/v1", api_key="none")
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(sdk, mode=mode)
        ask = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_retries": 0, "max_tokens": 200}
        person = client.create(response_model=Person, **ask)
        assert isinstance(person, Person), person
        print(mode, person)
        same(list(client.create_partial(response_model=Person, **ask))[-1].model_dump(), person.model_dump())

    sdk = OpenAI(base_url=f"{SCRIPTED}/v1", api_key="none")
    messages = [{"role": "user", "content": script("Person", {"name": "Jason", "age": 25}, "")}]
    client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
    person = client.create(model="scripted", messages=messages, response_model=Person)
    same((person.name, person.age), ("Jason", 25))


main()
