"""Train privately from Python, then use the released model: python train_and_predict.py [NUM_STEPS]"""

import sys

import sfumato

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 80
settings = {"privacy.epsilon": 2.0, "training.num_steps": num_steps}
recipe = sfumato.with_settings(sfumato.load_recipe("demo/digits"), settings)

result = sfumato.train(recipe, out="runs/example")
print(f"accuracy {result.scores.accuracy:.1%} at ε = {sfumato.privacy.round_up(result.privacy['epsilon'])}")
print(result.privacy["statement"])

classifier = sfumato.load(result.folder / "release")  # all that another machine would need
test_images = sfumato.load_data("digits").test.images
for prediction in classifier.predict(test_images[:3]):
    print(f"a {prediction.label} with probability {prediction.probability:.2f}")
