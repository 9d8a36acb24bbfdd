"""Sample for environments, agents and people: newest weights, and the base model beside them."""
