"""A chapter's assignment as a template repository for GitHub Classroom: modules, tests, a workflow.

Learners see the workflow that grades them, so only what may be seen is in it: parts and bug hunts,
with the course's own cases. Source: GitHub Classroom's documentation of its autograding actions.
"""

from minigen_course.grading.exercise import exercises
from minigen_course.grading.hunt import hunt_of
from minigen_course.grading.varied import example
from minigen_course.handout.course_files import REPOSITORY, headings
from minigen_course.handout.sheet import file_name
from minigen_course.handout.starter import files_of, hunt_file, starter
from minigen_course.kit.assignment import Assignment, stub_for

MINUTES = 10  # for one exercise, with the start of Python
WORKFLOW = """\
name: Autograding
on: [push, workflow_dispatch]
permissions: {{contents: read, actions: read, checks: write}}
jobs:
  grade:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12", cache: pip}}
      - run: pip install -r requirements.txt --extra-index-url https://download.pytorch.org/whl/cpu
{steps}
      - name: report
        uses: education/autograding-grading-reporter@v1
        env:
{results}
        with: {{runners: "{names}"}}
"""
STEP = """\
      - name: {name}
        id: {name}
        uses: education/autograding-command-grader@v1
        with:
          test-name: {name}
          command: minigen check {folder}/{file} --seed {seed}
          timeout: {minutes}
          max-score: {points}"""
README = """\
# Assignment {chapter}: {title}

Read the chapter first: {link}. Then write the parts in `{folder}/`; each file says what to do.

| exercise | points |
|---|--:|
{rows}

```bash
pip install -r requirements.txt
minigen check {folder} --hint 1    # each part in a process of its own, with hints
pytest {folder}                    # each check as one test
```

Every push is graded; the points are in the tab "Actions".
"""


def repository_of(assignment: Assignment, seed: int) -> dict[str, str]:
    """Return the files of an assignment's template repository by path."""
    chapter, folder = assignment.chapter, headings()[assignment.chapter].name
    files = files_of(chapter, folder)
    test = f"test_{folder}.py"
    found, graded, rows = {f"{folder}/{test}": files[test]}, [], []
    for item in assignment.items:
        if item.kind == "part":
            each, name = exercises(chapter)[item.name], file_name(item.name)
            text = starter(each, folder, example(each, seed))
            found[f"{folder}/{name}"] = text.replace(each.stub, stub_for(each))
        elif item.kind == "hunt":
            name = hunt_file(hunt_of(chapter, item.name))
            found[f"{folder}/{name}"] = files[name]
        else:
            continue
        graded.append((item.name, name, int(item.points)))
        rows.append(f"| {item.name} | {item.points:g} |")
    found["README.md"] = README.format(
        chapter=chapter,
        title=headings()[chapter].title,
        link=f"{REPOSITORY}/blob/main/notebooks/{folder}.ipynb",
        folder=folder,
        rows="\n".join(rows),
    )
    found["requirements.txt"] = f"minigen[notebooks,test] @ git+{REPOSITORY}\n"
    found[".github/workflows/classroom.yml"] = _workflow(graded, folder, seed)
    return found


def _workflow(graded: list[tuple[str, str, int]], folder: str, seed: int) -> str:
    steps = [
        STEP.format(name=name, folder=folder, file=file, seed=seed, minutes=MINUTES, points=points)
        for name, file, points in graded
    ]
    results = [
        f"          {name.upper()}_RESULTS: ${{{{steps.{name}.outputs.result}}}}"
        for name, _, _ in graded
    ]
    return WORKFLOW.format(
        steps="\n".join(steps),
        results="\n".join(results),
        names=",".join(name for name, _, _ in graded),
    )
