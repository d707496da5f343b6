"""Build what is published: version, wheel, bill of materials. No part of the program imports this."""
