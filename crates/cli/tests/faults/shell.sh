#!/bin/sh
# Stands for ssh: HOST COMMAND.
exec sh -c "$2"
