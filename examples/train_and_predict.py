"""Train privately from Python, then use the released model: python train_and_predict.py [NUM_STEPS]"""

import sys

import sfumato
from sfumato.recipes.recipe import load_recipe, with_settings
from sfumato.run import train

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 80
recipe = with_settings(load_recipe("demo/digits"), {"privacy.epsilon": 2.0, "training.num_steps": num_steps})

result = train(recipe, out="runs/example")
print(f"accuracy {result.scores.accuracy:.1%} at ε = {result.privacy['epsilon']:.3g}")
print(result.privacy["statement"])

classifier = sfumato.load(result.folder / "release")  # all that another machine would need
test_images = sfumato.load_data("digits").test.images
for prediction in classifier.predict(test_images[:3]):
    print(f"a {prediction.label} with probability {prediction.probability:.2f}")
