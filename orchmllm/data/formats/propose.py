def proposal(source, rows): return ""
