# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Grading, cell by cell
#
# Build a course of one chapter, play three students, grade them, and look at what they and you get.
# It takes about a minute, on Linux or macOS. The same in commands is on the
# [first page](README.md#ten-minutes).

# %%
from pathlib import Path
from tempfile import mkdtemp

from IPython.display import Image, Markdown

from minigen_course.figures.explore import png
from minigen_course.figures.style import BLUE, figure
from minigen_course.kit.box import Limits, isolation
from minigen_course.kit.build import Course, build
from minigen_course.kit.collect import collect
from minigen_course.kit.grade import grade_all
from minigen_course.kit.report.folder import write_all
from minigen_course.kit.report.summary import summary
from minigen_course.kit.tasks import assigned_in, handed_in

folder = Path(mkdtemp())

# %% [markdown]
# ## Build
#
# The seed draws examples, questions and hidden cases: another one, another course.

# %%
course = Course(chapters=("22",), seed=7, format="nbgrader")
for chapter in build(folder / "course", course):
    print(f"built: chapter {chapter}")
Markdown((folder / "course" / "varies.md").read_text(encoding="utf-8"))

# %% [markdown]
# ## Three students
#
# Ada hands in the model answers. Bob takes every block for one of 4 slots. Eve hands in what she
# got.

# %%
name = "22_paged"
released = (folder / "course" / "release" / name / f"{name}.ipynb").read_text(encoding="utf-8")
solved = (folder / "course" / "source" / name / f"{name}.ipynb").read_text(encoding="utf-8")
empty = "raise NotImplementedError  # your turn"
mistake = "return [block_ids[p // 4] * 4 + p % 4 for p in positions]"
work = {"ada": solved, "bob": released.replace(empty, mistake, 1), "eve": released}
for student, notebook in work.items():
    place = folder / "submissions" / student
    place.mkdir(parents=True)
    (place / f"{name}.ipynb").write_text(notebook, encoding="utf-8")

# %% [markdown]
# ## Grade
#
# Each answer runs in a process of its own, with limits.


# %%
def graded_now():
    submissions = collect(folder / "submissions")
    assigned, _ = handed_in(assigned_in(course.chapters), submissions)
    store = folder / "grades" / "results"
    found = grade_all(submissions, assigned, store, Limits(seconds=10), jobs=2, seed=course.seed)
    return sorted(found, key=lambda each: each.student)


print(isolation())
graded = graded_now()
for each in graded:
    print(f"{each.student}: {each.earned:g} of {each.points} points")

# %% [markdown]
# ## What Bob reads

# %%
(slots_of, *_) = graded[1].grades
print(f"{slots_of.name}: {slots_of.earned:g} of {slots_of.points} points")
for sentence in slots_of.failed:
    print(f"- {sentence}")

# %% [markdown]
# ## What you read
#
# The summary names the hardest exercises, with the check that most answers fail.

# %%
Markdown(summary(graded))

# %%
grades = list(zip(*(each.grades for each in graded), strict=True))
shares = [
    100 * sum(each.earned for each in some) / sum(each.points for each in some) for some in grades
]
made, axes = figure(8, 2.8)
axes.barh([some[0].name for some in grades], shares, color=BLUE)
axes.invert_yaxis()
axes.set(xlim=(0, 100), xlabel="points of this class (%)")
Image(png(made))

# %% [markdown]
# ## Again
#
# Bob hands in a corrected answer. Only his submission is graded again: the others have not changed.

# %%
right = "return [block_ids[p // block_size] * block_size + p % block_size for p in positions]"
corrected = released.replace(empty, right, 1)
(folder / "submissions" / "bob" / f"{name}.ipynb").write_text(corrected, encoding="utf-8")
graded = graded_now()
for each in graded:
    print(f"{each.student}: {each.earned:g} of {each.points} points")

# %% [markdown]
# `write_all` writes marks, feedback and summary, as `minigen course grade` does.

# %%
for path in write_all(graded, folder / "grades"):
    print(path.relative_to(folder).as_posix())
