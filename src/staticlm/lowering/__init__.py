"""ExportedPrograms -> `.pte`: contributed passes, constant names, backends and their options."""
