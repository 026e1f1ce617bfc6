"""How user turns begin: a kind of task, often with a subject; the target writes the rest of the turn.

Left alone, a small model asks for much the same few things again and again.
"""

from __future__ import annotations

import random

# {topic}, {thing}, {n} are filled in; an opener without full stop leaves the turn's end to the target.
OPENERS = """
What is the history of {topic}
Can you explain how {topic} works
Explain {topic} in simple terms
Tell me about {topic}
Why is {topic} important
What are the main ideas behind {topic}
How does {topic} affect our daily lives
What are the advantages and disadvantages of {topic}
Compare {topic} and {topic}
What is the relationship between {topic} and {topic}
Give me {n} facts about {topic}.
List {n} examples of {topic}
List {n} tips for
Name {n} famous
Give me {n} ideas for
What are {n} ways to
Make a list of
Write a short story about
Write a story in which {thing}
Write a poem about {topic}
Write a haiku about
Write a letter to
Write an email to my
Write a short dialogue between
Write a paragraph about {topic}
Write an essay on {topic}
Write a product description for
Write a tweet about {topic}
Write a job description for
Write a speech about
Write a blog post about {topic}
Write instructions for
Write a recipe for
Write a Python function that
Write a Python function to
Write a Python program that
Write a Python script that reads
Write a Python class for
Write a JavaScript function that
Write a function in C that
Write a SQL query that
Write a Bash script that
Write an HTML page with
Write a regular expression that
Explain what this code does: def
Explain what this code does: for
Fix the bug in this code:
What does the error
How do I sort a list
How do I use {topic} in Python
What is the difference between a list and
Calculate
What is {n} times
What is {n} plus
What is {n} percent of
Solve the equation
A farmer has {n}
A shop sells {n}
A car travels {n}
John has {n}
If a rectangle has
If {n} people
There are {n} students in a class
Find the average of
Convert {n} miles to
Convert {n} degrees
Simplify the expression
How many minutes are in {n}
Rewrite the following sentence
Rewrite this text in a friendly tone:
Make this sentence shorter:
Make this more polite:
Correct the spelling in this sentence:
Correct the grammar of this text:
Change this sentence to the passive voice:
Rewrite in the future tense:
Paraphrase the following:
Summarize the following text:
Summarize this paragraph in one sentence: The
Summarize the plot of
Give a short summary of {topic}.
Turn the following into a list:
Extract the names from this text:
Classify the sentiment of this review:
Is this statement true or false:
Translate the following sentence to French:
Translate to Spanish:
Translate the word
What does the word
Give me a synonym for
Use the word
Complete the sentence:
Finish the story: Once upon a time
Continue this text: The
Repeat the following text:
Answer the question based on the text: The
Read this passage and answer:
What is the capital of
Who was
Who invented
Who wrote
When did
When was
Where is
Where do
Why do
Why does
Why did
How can I
How do I
How do you
How does
How is
How are
How many
How much
How to
Can you help me
Can you give me
Could you please
Could you suggest
Please describe
Please help me
Please write
What are the benefits of
What are the steps to
What are the causes of
What are the symptoms of
What are some good
What are some
What is the best way to
What is the meaning of
What is the difference between
What is the purpose of
What is a
What is an
What happens when
What happens if
What should I do
What would happen
Which is better,
Which of the following
I am
I want to
I need
I need help with
I have a
I'm planning
I'm looking for
I feel
I don't understand
My
My boss
My dog
My child
Hello
Hi,
Tell me a joke
Tell me a fun fact about {topic}
Suggest
Recommend
Describe
Define
Imagine
Pretend you are
Act as
Create
Create a table
Create a plan for
Design
Plan a
Give me advice
Give an example of
Give me a step by step guide
Help me
Let's
Should I
Is it
Is there
Are there
Do you
Does
Did
Thank you
In what year
In one sentence, what is {topic}?
Briefly explain {topic}.
Describe {topic} to a child.
Describe the process of
Discuss the role of {topic} in
Analyze
Identify
Provide
Generate
Find
Compose
Brainstorm
Outline
Prepare
Edit the following
You are
""".strip().splitlines()

TOPICS = (
    """
photosynthesis|gravity|black holes|the water cycle|volcanoes|earthquakes|the human heart|the immune system|DNA|evolution
atoms and molecules|electricity|magnets|light|sound waves|the periodic table|chemical reactions|the solar system
the Moon
climate change|renewable energy|solar panels|wind power|nuclear energy|recycling|plastic pollution|deforestation
coral reefs
rainforests|deserts|rivers and lakes|mountains|glaciers|hurricanes|the ocean|whales|dolphins|bees|butterflies|ants|birds
dinosaurs|elephants|dogs|cats|horses|farm animals|bread|cheese|chocolate|coffee|tea|wine|rice|pasta|pizza|vegetables
fruit
nutrition|exercise|yoga|running|swimming|cycling|football|basketball|tennis|chess|the Olympics|sleep|stress|meditation
mental health|headaches|the common cold|diabetes|vitamins|dental care|first aid|surgery|hospitals|aging|childhood
education|schools|universities|homework|reading|writing|libraries|languages|grammar|poetry|novels|fairy tales|mythology
ancient Egypt|ancient Rome|ancient Greece|the Middle Ages|the Renaissance|the Industrial Revolution|World War I
World War II|the Cold War|the French Revolution|the American Civil War|the Silk Road|the Vikings|the Aztecs|Japan|China
India|Brazil|Mexico|Canada|France|Germany|Italy|Spain|Egypt|Kenya|Australia|New York|London|Paris|Tokyo|democracy
elections|human rights|laws|courts|taxes|money|banks|inflation|the stock market|insurance|budgeting|saving
small business
marketing|advertising|customer service|leadership|teamwork|time management|job interviews|resumes|remote work|meetings
computers|the internet|email|smartphones|social media|video games|robots|artificial intelligence|machine learning
neural networks|databases|algorithms|recursion|sorting|loops|functions|variables|strings|dictionaries|classes|testing
debugging|version control|encryption|passwords|cloud computing|operating systems|web pages|data science|statistics
probability|fractions|percentages|algebra|geometry|triangles|circles|prime numbers|matrices|calculus|logic|music
the piano
the guitar|jazz|classical music|opera|painting|sculpture|photography|film|theatre|dance|architecture|bridges|trains
cars
airplanes|ships|space travel|satellites|telescopes|the weather|seasons|gardening|trees|flowers|houseplants|cooking
baking
camping|hiking|travel|museums|holidays|weddings|birthdays|friendship|family|parenting|love|happiness|anger|courage
honesty
kindness|creativity|curiosity|philosophy|ethics|religion|psychology|memory|dreams|habits|motivation|public speaking
""".strip()
    .replace("\n", "|")
    .split("|")
)

THINGS = (
    """
a lost key is found|two friends meet again|a robot learns to paint|a child talks to the sea|it never stops raining
a cat becomes mayor|a letter arrives too late|the lights go out|a tree remembers everything|a town forgets its name
someone finds a door in the forest|a baker makes a mistake|a dragon is afraid of fire|the last train leaves|a clock runs
backwards|a dog saves the day|a map leads home|a musician loses her violin|a storm changes everything|a secret is told
""".strip()
    .replace("\n", "|")
    .split("|")
)

UNSEEDED = 0.15


def opener(rng: random.Random) -> str:
    """The beginning of a user turn; now and then empty, so that the target says itself what it is asked."""
    if rng.random() < UNSEEDED:
        return ""
    text = rng.choice(OPENERS)
    while "{topic}" in text:
        text = text.replace("{topic}", rng.choice(TOPICS), 1)
    number = rng.choice([rng.randint(2, 12), rng.randint(2, 12), rng.randint(13, 99), rng.randint(100, 999)])
    return text.replace("{thing}", rng.choice(THINGS)).replace("{n}", str(number))
